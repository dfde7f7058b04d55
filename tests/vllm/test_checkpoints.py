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
    @pytest.mark.parametrize("format", ["compressed-tensors", "modelopt", "autofp8", "quark"])
    def test_vllm_reads_scales_per_tensor(self, load_model, serve, tmp_path, format):
        # vLLM's loader rounds the scales of all other formats to the model's dtype.
        is_rounded = format != "compressed-tensors"
        scales = make_scales("tensor")
        checkpoint_copy = tmp_path / "copy"
        _, folder = load_model("llama")
        scales.save_pretrained(checkpoint_copy, format=format, checkpoint=folder)
        llm = serve(str(checkpoint_copy), "fp8", dtype="bfloat16")
        for index, loaded_scales in enumerate(get_loaded_scales(llm)):
            for actual, expected in zip(loaded_scales, scales.layers[index].static, strict=True):
                assert actual.item() == (expected.bfloat16() if is_rounded else expected).item()

    @pytest.mark.parametrize("format", ["tgi", "hf_fp8kv"])
    def test_vllm_ignores_scales_in_unsupported_formats(self, load_model, serve, tmp_path, format):
        """With scales among the weights but no quantization config, vLLM would fail."""
        _, folder = load_model("llama")
        checkpoint_copy = tmp_path / "copy"
        make_scales("tensor").save_pretrained(checkpoint_copy, format=format, checkpoint=folder)
        assert all(k == v == 1 for k, v in get_loaded_scales(serve(str(checkpoint_copy), "fp8")))

    @pytest.mark.parametrize(
        ("granularity", "location"), [("tensor", "shards"), ("head", "a folder")]
    )
    def test_vllm_reads_scales_in_shards_and_per_head(
        self, load_model, serve, tmp_path, granularity, location
    ):
        model, folder = load_model("llama")
        scales = make_scales(granularity)
        checkpoint_copy = tmp_path / "copy"
        options = {"checkpoint": folder}
        if location == "shards":
            options["checkpoint"] = tmp_path / "shards"
            model.save_pretrained(tmp_path / "shards", max_shard_size="200KB")
            assert (tmp_path / "shards" / "model.safetensors.index.json").exists()
        scales.save_pretrained(checkpoint_copy, format="compressed-tensors", **options)
        llm = serve(str(checkpoint_copy), "fp8")
        for index, loaded_scales in enumerate(get_loaded_scales(llm)):
            for actual, expected in zip(loaded_scales, scales.layers[index].static, strict=True):
                assert torch.equal(actual.flatten(), expected.flatten())
                assert granularity == "tensor" or actual.shape == (NUM_HEADS,)


@pytest.mark.parametrize("granularity", ["tensor", "head"])
def test_static_dtypes_use_the_scales_of_the_served_checkpoint(
    load_model, prompts, serve, tmp_path, granularity
):
    model, folder = load_model("llama")
    scales = make_scales(granularity)
    checkpoint_copy = tmp_path / "copy"
    scales.save_pretrained(checkpoint_copy, format="compressed-tensors", checkpoint=folder)
    tokens, _ = generate(serve(str(checkpoint_copy), "hf_fp8kv_static"), prompts)
    assert tokens == generate_expected(
        model, prompts, scales=KVScales.from_pretrained(checkpoint_copy)
    )
