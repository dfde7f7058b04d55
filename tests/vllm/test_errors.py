"""Tests of how the plugin reads options and scales, and refuses unsupported ones before serving."""

import importlib.metadata
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

import hf_fp8kv.vllm
from hf_fp8kv import KVScales
from hf_fp8kv.errors import ConfigError, ScaleError
from hf_fp8kv.serving.config import make_layer_storage
from hf_fp8kv.vllm.storage import check_scales, count_slot_bytes, read_options
from tests.helpers.planned import make_planned_scales

from .conftest import make_scales


def read_passed_options(dtype, options=None, checkpoint="nowhere", tp_rank=0, tp_size=1):
    return read_options(dtype, {"hf_fp8kv": options or {}}, checkpoint, tp_rank, tp_size)


# -- without vLLM ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "scales", "num_bytes"),
    [("hf_fp8kv_e3m4", None, 132), ("hf_fp8kv_e3m4_static", 1.0, 128)],
)
def test_the_dtype_determines_the_bytes_of_a_token(dtype, scales, num_bytes):
    options = read_passed_options(dtype, {"scales": scales})
    assert count_slot_bytes(options, 0, 64, torch.bfloat16) == num_bytes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale": 1.0}, "expected a dict of scales, plan, backend"),
        ({"scales": ["a"]}, r"scales: expected a .*got \["),
        ({"scales": {}}, r"scales: expected a .*got \{"),
        ({"plan": 1.0}, "plan: expected a .*got 1.0"),
        ({"backend": ["torch"]}, r"backend: expected a .*got \["),
        ({"scales": True}, "expected a finite number above 0"),
    ],
)
def test_invalid_options_are_refused(options, message):
    assert read_passed_options("hf_fp8kv_static", {"scales": 1.0}).scales == 1.0
    error = ScaleError if options.get("scales") is True else ConfigError
    with pytest.raises(error, match=message):
        read_passed_options("hf_fp8kv_static", options)


def test_files_are_read_for_each_engine(tmp_path):
    # The second engine of a process may find different scales in the same folder.
    config = {"hf_fp8kv": {"scales": str(tmp_path)}}
    saved_scales = [("first engine", "head", (2, 1)), ("second engine", "tensor", ())]
    for engine, granularity, shape in saved_scales:
        make_scales(granularity).save_pretrained(tmp_path, overwrite=True)
        options = read_options("hf_fp8kv_static", config, "nowhere", 0, 1, engine=engine)
        assert options.scales.layers[0].k.shape == shape


def test_scales_are_read_from_the_revision_of_the_checkpoint(monkeypatch):
    from_pretrained = mock.Mock(return_value=make_scales("head"))
    monkeypatch.setattr(KVScales, "from_pretrained", from_pretrained)
    read_options("hf_fp8kv_static", {}, "org/model", 0, 1, revision="v2")
    (call,) = from_pretrained.call_args_list
    assert (call.args, call.kwargs["revision"]) == (("org/model",), "v2")


def test_static_scales_are_refused_for_a_dynamic_dtype(tmp_path):
    make_scales("head").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="Use hf_fp8kv_e4m3_static"):
        read_passed_options("hf_fp8kv_e4m3", {"scales": str(tmp_path)})


def test_a_plan_requires_the_dynamic_dtype_without_a_format(tmp_path):
    plan = make_planned_scales(2, dim=32, is_dynamic=True)
    plan.save_pretrained(tmp_path)
    options = {"plan": str(tmp_path)}
    for tp_size, tp_rank in ((1, 0), (2, 1)):
        parsed_options = read_passed_options("hf_fp8kv", options, tp_rank=tp_rank, tp_size=tp_size)
        storage = make_layer_storage(parsed_options, 0, 2 // tp_size, 32, "cpu")
        assert (storage.plan, storage.k_scale) == (plan.plan[0], None)
        assert torch.equal(storage.center, plan.layers[0].k_center[tp_rank:])
    with pytest.raises(ScaleError, match="expected scales of a 'qwen2' model"):
        check_scales(parsed_options, 2, ["qwen2"])
    with pytest.raises(ConfigError, match="Use hf_fp8kv for these scales"):
        read_passed_options("hf_fp8kv_static", options)
    with pytest.raises(ConfigError, match="dtype: expected None, because the plan defines"):
        read_passed_options("hf_fp8kv_e3m4", options)
    with pytest.raises(ConfigError, match="Pass it as plan"):
        read_passed_options("hf_fp8kv", options | {"scales": str(tmp_path)})


def test_a_checkpoint_without_scales_is_refused(tmp_path):
    with pytest.raises(ScaleError, match="expected"):
        read_passed_options("hf_fp8kv_static", checkpoint=str(tmp_path))


def test_scales_of_a_different_model_are_refused(tmp_path):
    make_scales("head", model_type="mistral").save_pretrained(tmp_path)
    options = read_passed_options("hf_fp8kv_static", {"scales": str(tmp_path)})
    check_scales(options, 2, ["mistral"])
    check_scales(options, 2, ["mistral_text", "mistral"])
    with pytest.raises(ScaleError, match="expected scales of a 'llama' model, got 'mistral'"):
        check_scales(options, 2, ["llama"])
    with pytest.raises(ScaleError, match="expected only the model's layers, 0 to 0"):
        check_scales(options, 1, ["mistral"])
    with pytest.raises(ScaleError, match="expected layer 2, got layers 0, 1"):
        make_layer_storage(options, 2, 2, 32, "cpu")


@pytest.mark.parametrize(
    ("tp_size", "tp_rank", "head"), [(2, 0, 0), (2, 1, 1), (4, 1, 0), (4, 2, 1)]
)
def test_each_rank_gets_the_scales_of_its_heads(tmp_path, tp_size, tp_rank, head):
    # Rank 1 of 2 has the second half of the heads. With 4 ranks, two ranks share a head.
    scales = make_scales("head", centered=True)
    scales.save_pretrained(tmp_path)
    options = read_passed_options(
        "hf_fp8kv_static", {"scales": str(tmp_path)}, tp_rank=tp_rank, tp_size=tp_size
    )
    storage = make_layer_storage(options, 1, 1, 32, "cpu")
    assert torch.equal(storage.k_scale, scales.layers[1].k[head].expand(1, 32))
    assert torch.equal(storage.v_scale, scales.layers[1].v[head].expand(1, 32))
    assert torch.equal(storage.center, scales.layers[1].k_center[head][None])


def test_registering_without_vllm_does_nothing(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    hf_fp8kv.vllm.register()  # this would fail if it imported vLLM


@pytest.mark.parametrize(
    ("version", "message"),
    [
        ("0.31.2", "expected vLLM 0.32.x or 0.33.x, got 0.31.2"),
        ("unknown", "expected vLLM 0.32.x or 0.33.x, got unknown"),
        ("0.33.9", "could not register its dtypes in vLLM 0.33.9"),
    ],
)
def test_an_unsupported_version_or_a_missing_hook_registers_nothing(
    monkeypatch, caplog, version, message
):
    # An error would prevent vLLM from starting with any dtype. Here 0.33.9 lacks a hook.
    lacks_hook = version == "0.33.9"
    module = SimpleNamespace(register_dtypes=lambda: {}["no such hook"]) if lacks_hook else None
    monkeypatch.setattr("importlib.util.find_spec", lambda _: object())
    monkeypatch.setattr(importlib.metadata, "version", lambda _: version)
    monkeypatch.setitem(sys.modules, "hf_fp8kv.vllm.registration", module)
    hf_fp8kv.vllm.register()
    assert message in caplog.text
    assert not lacks_hook or "KeyError: 'no such hook'" in caplog.text


class TestWithVLLM:
    @pytest.fixture(autouse=True)
    def _require_vllm(self):
        pytest.importorskip("vllm")

    def test_batch_invariance_is_refused_on_a_cpu(self, monkeypatch):
        # vLLM's own mode replaces operations by Triton kernels, which need a GPU.
        from vllm.config import CacheConfig, VllmConfig, set_current_vllm_config

        from hf_fp8kv.vllm import register, select

        register()
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
        config = VllmConfig(cache_config=CacheConfig(cache_dtype="hf_fp8kv"))
        with (
            set_current_vllm_config(config),
            pytest.raises(ConfigError, match="VLLM_BATCH_INVARIANT: expected a GPU"),
        ):
            _ = select.CPU_ATTN

    def test_backends_without_cuda_graphs_are_refused_on_a_gpu(self):
        from hf_fp8kv.vllm.layers import PagedImpl

        impl = PagedImpl.__new__(PagedImpl)  # needs a configuration of vLLM
        impl.options = read_passed_options("hf_fp8kv", {"backend": "cpu"})
        with pytest.raises(ConfigError, match="expected triton on a GPU, got 'cpu'"):
            impl.bind(0, torch.float32, torch.device("cuda"))

    def test_a_block_size_must_be_a_power_of_two(self, load_model, start_engine):
        _, folder = load_model("llama")
        with pytest.raises(ConfigError, match="power of two from 8"):
            start_engine(folder, "hf_fp8kv", block_size=96)

    def test_attention_with_latents_is_refused(self):
        from vllm.config import CacheConfig, VllmConfig, set_current_vllm_config
        from vllm.v1.attention.backends.registry import AttentionBackendEnum

        hf_fp8kv.vllm.register()
        attention = AttentionBackendEnum["CPU_MLA"]
        with set_current_vllm_config(VllmConfig(cache_config=CacheConfig(cache_dtype="auto"))):
            assert attention.get_class().__module__.startswith("vllm.")
        config = VllmConfig(cache_config=CacheConfig(cache_dtype="hf_fp8kv_e3m4"))
        with (
            set_current_vllm_config(config),
            pytest.raises(ConfigError, match="got a model with latents"),
        ):
            attention.get_class()

    def test_unsupported_kinds_of_attention_are_refused(self):
        from vllm.config import CacheConfig, VllmConfig
        from vllm.v1.kv_cache_interface import FullAttentionSpec, RSWASpec, SinkFullAttentionSpec

        from hf_fp8kv.vllm.layers import refuse_spec, refuse_unsupported

        sizes = {"block_size": 32, "num_kv_heads": 2, "head_size": 64, "dtype": torch.int8}
        dtype_name = "hf_fp8kv_e3m4"
        refused_specs = [
            (SinkFullAttentionSpec(**sizes, sink_len=32), "got pages of type SinkFull"),
            (RSWASpec(**sizes, rswa_window=8), "got pages of type RSWASpec"),
            (FullAttentionSpec(**sizes, non_causal=True), "that is not causal"),
            (FullAttentionSpec(**sizes, head_size_v=32), "values whose size differs"),
        ]
        for spec, message in refused_specs:
            with pytest.raises(ConfigError, match=message):
                refuse_spec(dtype_name, spec)
        config = VllmConfig(cache_config=CacheConfig(cache_dtype=dtype_name))
        refuse_unsupported(dtype_name, "decoder", None, config)
        with pytest.raises(ConfigError, match="'encoder_decoder'"):
            refuse_unsupported(dtype_name, "encoder_decoder", None, config)
        with pytest.raises(ConfigError, match="got ALiBi"):
            refuse_unsupported(dtype_name, "decoder", [1.0], config)
        config.cache_config.kv_sharing_fast_prefill = True
        with pytest.raises(ConfigError, match="got --kv-sharing-fast-prefill"):
            refuse_unsupported(dtype_name, "decoder", None, config)
        config.attention_config.use_non_causal = True
        with pytest.raises(ConfigError, match="that is not causal"):
            refuse_unsupported(dtype_name, "decoder", None, config)
