"""Tests of the plugin's attention backend for GPUs, and of its registrations in vLLM 0.33.

The tests run the backend on a CPU, so they need no GPU.
"""

import os
import subprocess
import sys
from functools import partial

import pytest
import torch

from ..helpers.planned import make_protected_plan_for
from .conftest import HEAD_DIM, generate, generate_expected, make_scales

vllm = pytest.importorskip("vllm")


@pytest.fixture
def gpu_backend():
    """Make vLLM's CPU platform use the plugin's attention backend for GPUs."""
    from vllm.plugins import load_general_plugins
    from vllm.v1.attention import selector
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    load_general_plugins()  # a later load would select the plugin's backend for CPUs
    original_path = AttentionBackendEnum.CPU_ATTN.get_path()
    register_backend(AttentionBackendEnum.CPU_ATTN, AttentionBackendEnum["HF_FP8KV"].get_path())
    selector._cached_get_attn_backend.cache_clear()
    yield
    register_backend(AttentionBackendEnum.CPU_ATTN, original_path)
    selector._cached_get_attn_backend.cache_clear()


@pytest.mark.usefixtures("gpu_backend")
def test_the_gpu_backend_gives_the_same_tokens(load_model, prompts, start_engine, tmp_path):
    from hf_fp8kv.vllm.gpu import PagedGPUBackend

    model, folder = load_model("gemma2")
    scales = make_scales("head", centered=True)
    scales.save_pretrained(tmp_path)
    llm = start_engine(folder, "hf_fp8kv_static", tmp_path)
    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context
    backends = {layer.attn_backend for layer in layers.values()}
    assert {(backend.__base__, backend.slot) for backend in backends} == {
        (PagedGPUBackend, (2 * HEAD_DIM, 1))
    }
    for layer in layers.values():
        layer.process_weights_after_loading(torch.float32)  # as if weights were loaded again
    assert {layer.attn_backend for layer in layers.values()} == backends
    assert generate(llm, prompts)[0] == generate_expected(model, prompts, scales=scales)


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.usefixtures("gpu_backend")
def test_logprobs_do_not_depend_on_the_batch_or_the_chunks(
    load_model, prompts, start_engine, backend, monkeypatch
):
    # vLLM's own mode needs a GPU, so linear layers compute single rows instead.
    from vllm.model_executor.determinism import batch_invariant

    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    monkeypatch.setattr(batch_invariant, "enable_batch_invariant_mode", lambda: None)
    _, folder = load_model("gemma2" if backend == "cpu" else "llama")
    answers = []
    for chunk_size, batch_size in ((128, len(prompts)), (48, 1)):
        llm = start_engine(
            folder, "hf_fp8kv_e3m4", backend=backend, max_num_batched_tokens=chunk_size,
            enable_prefix_caching=False,
        )  # fmt: skip
        llm.apply_model(multiply_single_rows)
        logprobs = []
        for start in range(0, len(prompts), batch_size):
            logprobs += read_logprobs(llm, prompts[start : start + batch_size])
        answers.append(logprobs)
    assert answers[0] == answers[1]


def multiply_single_rows(model):
    def multiply_rows(multiply, x, weight, bias):
        return torch.cat([multiply(row, weight, bias) for row in x.split(1)])

    for module in model.modules():
        if hasattr(module, "cpu_linear"):
            module.cpu_linear = partial(multiply_rows, module.cpu_linear)


def read_logprobs(llm, prompts):
    sampling = vllm.SamplingParams(
        temperature=0, max_tokens=8, ignore_eos=True, detokenize=False, logprobs=20
    )
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
    for output in outputs:
        for step in output.outputs[0].logprobs:
            yield {token: entry.logprob for token, entry in step.items()}


# K of layer 0 is in float32, so this layer has 4 * 32 + 32 + 4 bytes per token and head, and other
# layers have 32 + 32 + 4 bytes. With several windows, blocks have one size, so the bytes of layer 0
# are rounded up to 4 * 68, and blocks of other layers have four times more tokens.
WINDOW_SHAPES = [(32, 272)] + 5 * [(4 * 32, 68)]


@pytest.mark.parametrize(
    ("name", "layout", "expected"),
    [
        ("llama", None, [(32, 164), (32, 68)]), ("gemma2_deep", "LBHNC", WINDOW_SHAPES),
        ("gemma2_deep", "BLHNC", WINDOW_SHAPES),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("gpu_backend")
def test_layers_may_have_slots_of_different_sizes(
    load_model, prompts, start_engine, tmp_path, name, layout, expected, monkeypatch
):
    if layout is not None:
        monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", layout)
    model, folder = load_model(name)
    plan = make_protected_plan_for(model, "K")
    plan.save_pretrained(tmp_path)
    llm = start_engine(folder, "hf_fp8kv", plan=tmp_path)
    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context
    assert [tuple(layer.kv_cache.shape[2:]) for layer in layers.values()] == expected
    assert generate(llm, prompts)[0] == generate_expected(model, prompts, plan=plan)


def test_the_gpu_backend_accepts_only_supported_models():
    from vllm.platforms.interface import DeviceCapability

    from hf_fp8kv.vllm.gpu import PagedGPUBackend

    supported_config = {
        "head_size": 128, "dtype": torch.bfloat16, "kv_cache_dtype": "hf_fp8kv_e3m4",
        "block_size": 64, "use_mla": False, "has_sink": True, "use_sparse": False,
        "use_mm_prefix": False, "use_per_head_quant_scales": True, "attn_type": "decoder",
        "device_capability": DeviceCapability(9, 0), "has_sliding_window": True,
        "use_batch_invariant": True,
    }  # fmt: skip
    list_problems = PagedGPUBackend.validate_configuration
    assert list_problems(**supported_config) == []
    unsupported_entries = [
        {"kv_cache_dtype": "fp8_e4m3"}, {"kv_cache_dtype": "auto"}, {"block_size": 24},
        {"use_mla": True}, {"attn_type": "encoder_decoder"},
        {"device_capability": DeviceCapability(7, 5)}, {"use_non_causal": True},
        {"use_adaptive_verification": True},
    ]  # fmt: skip
    for entry in unsupported_entries:
        assert len(list_problems(**supported_config | entry)) == 1, entry


# The script checks the registrations in the installed vLLM after two calls of `register`.
REGISTRATION_SCRIPT = """
import vllm
import hf_fp8kv.vllm
hf_fp8kv.vllm.register(); hf_fp8kv.vllm.register()
from vllm.config import cache
from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE as dtypes
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_interface import FullAttentionSpec, get_kv_quant_mode
from hf_fp8kv.vllm.gpu import PagedGPUBackend
from hf_fp8kv.vllm.specs import customize_backend
name = "hf_fp8kv_e3m4"
assert cache.KV_CACHE_DTYPES.count(name) == 1
# vLLM must not treat the bytes as a quantized format of vLLM, such as OCTAVE.
mode = get_kv_quant_mode(name)
assert mode == 0 and not mode.is_octave and not mode.is_custom_mode
spec = FullAttentionSpec(block_size=64, num_kv_heads=2, head_size=128, dtype=dtypes[name])
backend = customize_backend(PagedGPUBackend, 260, frozenset({260}))
assert backend.customize_spec(spec).page_size_bytes == 64 * 2 * 260
assert cache.CacheConfig(cache_dtype=name).cache_dtype == name
assert AttentionBackendEnum["HF_FP8KV"].get_class().__name__ == "PagedGPUBackend"
print("version", vllm.__version__)
"""


@pytest.mark.skipif("VLLM_0_33" not in os.environ, reason="needs vLLM 0.33's Python files")
def test_the_plugin_registers_in_vllm_0_33(tmp_path):
    # The environment variable VLLM_0_33 names a folder with the Python files of vLLM's wheel.
    process = subprocess.run(
        [sys.executable, "-c", REGISTRATION_SCRIPT], cwd=tmp_path, capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": os.environ["VLLM_0_33"]},
    )  # fmt: skip
    assert "version 0.33" in process.stdout, process.stderr[-2000:]
