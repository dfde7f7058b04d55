"""Tests that vLLM's loader reads the scales in checkpoints that this package writes."""

import pytest
import torch

from hf_fp8kv.scales import KVScales

from .conftest import NUM_HEADS, NUM_LAYERS, generate, generate_expected, make_scales


def get_loaded_scales(llm):
    """Return the scales of K and V of each layer after vLLM's loader has run."""
    modules = llm.llm_engine.vllm_config.compilation_config.static_forward_context
    layers = [modules[f"model.layers.{index}.self_attn.attn"] for index in range(NUM_LAYERS)]
    return [(layer._k_scale.float(), layer._v_scale.float()) for layer in layers]


@pytest.mark.skipif(
    "avx512" not in torch.backends.cpu.get_cpu_capability().lower(),
    reason="vLLM's fp8 on a CPU needs AVX-512",
)
class TestLoader:
    @pytest.mark.parametrize(
        ("format", "granularity", "location", "dtype"),
        [
            ("compressed-tensors", "tensor", "a folder", "bfloat16"),
            ("modelopt", "tensor", "a folder", "bfloat16"),
            ("autofp8", "tensor", "a folder", "bfloat16"),
            ("quark", "tensor", "a folder", "bfloat16"),
            ("compressed-tensors", "tensor", "shards", "float32"),
            ("compressed-tensors", "head", "a folder", "float32"),
        ],
    )
    def test_vllm_reads_scales(
        self, load_model, start_engine, tmp_path, format, granularity, location, dtype
    ):
        model, folder = load_model("llama")
        scales = make_scales(granularity)
        if location == "shards":
            folder = tmp_path / "shards"
            model.save_pretrained(folder, max_shard_size="200KB")
            assert (folder / "model.safetensors.index.json").exists()
        scales.save_pretrained(tmp_path / "copy", format=format, checkpoint=folder)
        llm = start_engine(str(tmp_path / "copy"), "fp8", dtype=dtype)
        # vLLM's loader rounds the scales of all other formats to the model's dtype.
        stored_dtype = torch.float32 if format == "compressed-tensors" else torch.bfloat16
        for index, loaded_scales in enumerate(get_loaded_scales(llm)):
            for actual, expected in zip(loaded_scales, scales.layers[index].static, strict=True):
                assert torch.equal(actual.flatten(), expected.to(stored_dtype).float().flatten())
                assert granularity == "tensor" or actual.shape == (NUM_HEADS,)

    @pytest.mark.parametrize("format", ["tgi", "hf_fp8kv"])
    def test_vllm_ignores_scales_in_unsupported_formats(
        self, load_model, start_engine, tmp_path, format
    ):
        # With scales among the weights but no quantization config, vLLM would fail.
        _, folder = load_model("llama")
        make_scales("tensor").save_pretrained(tmp_path / "copy", format=format, checkpoint=folder)
        assert all(
            k == v == 1 for k, v in get_loaded_scales(start_engine(str(tmp_path / "copy"), "fp8"))
        )


@pytest.mark.parametrize("granularity", ["tensor", "head"])
def test_static_dtypes_use_the_scales_of_the_served_checkpoint(
    load_model, prompts, start_engine, tmp_path, granularity
):
    model, folder = load_model("llama")
    checkpoint_copy = tmp_path / "copy"
    make_scales(granularity).save_pretrained(
        checkpoint_copy, format="compressed-tensors", checkpoint=folder
    )
    tokens, _ = generate(start_engine(str(checkpoint_copy), "hf_fp8kv_static"), prompts)
    assert tokens == generate_expected(
        model, prompts, scales=KVScales.from_pretrained(checkpoint_copy)
    )
