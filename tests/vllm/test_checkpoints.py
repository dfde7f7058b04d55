"""Checkpoints that we write, judged by the server: vLLM's own loader reads the scales back."""

import shutil

import pytest
import torch

from hf_fp8kv.scales import KVScales

from .conftest import HEADS, LAYERS, generate, generate_here, make_scales


def loaded_scales(llm):
    """Return `_k_scale` and `_v_scale` of each layer, as vLLM's loader left them."""
    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context
    attention = [layers[f"model.layers.{index}.self_attn.attn"] for index in range(LAYERS)]
    return [(layer._k_scale.float(), layer._v_scale.float()) for layer in attention]


@pytest.mark.skipif(
    "avx512" not in torch.backends.cpu.get_cpu_capability().lower(),
    reason="vLLM's own fp8 on a CPU needs AVX-512",
)
class TestLoader:
    @pytest.mark.parametrize("format", ["compressed-tensors", "modelopt", "autofp8", "quark"])
    def test_per_tensor(self, models, serve, tmp_path, format):
        rounded = format != "compressed-tensors"  # the loader holds these in the model's dtype
        _, folder = models("llama")
        scales = make_scales("tensor")
        copy = tmp_path / "copy"
        scales.save_pretrained(copy, format=format, checkpoint=folder)
        for index, (k, v) in enumerate(loaded_scales(serve(str(copy), "fp8", dtype="bfloat16"))):
            ours = [x.bfloat16().float() if rounded else x for x in scales.layers[index].static]
            assert [k.item(), v.item()] == [x.item() for x in ours]

    def test_shards(self, models, serve, tmp_path):
        """The weights in several files, whose index names ours, too."""
        model, _ = models("llama")
        scales = make_scales("tensor")
        model.save_pretrained(tmp_path / "shards", max_shard_size="200KB")
        assert (tmp_path / "shards" / "model.safetensors.index.json").exists()
        copy = tmp_path / "copy"
        scales.save_pretrained(copy, format="compressed-tensors", checkpoint=tmp_path / "shards")
        for index, (k, v) in enumerate(loaded_scales(serve(str(copy), "fp8"))):
            assert [k.item(), v.item()] == [x.item() for x in scales.layers[index].static]

    @pytest.mark.parametrize("format", ["tgi", "hf_fp8kv"])
    def test_scales_that_it_does_not_take(self, models, serve, tmp_path, format):
        """Without a quantisation config it would stop at scales among the weights."""
        _, folder = models("llama")
        copy = tmp_path / "copy"
        make_scales("tensor").save_pretrained(copy, format=format, checkpoint=folder)
        assert all(k == v == 1 for k, v in loaded_scales(serve(str(copy), "fp8")))

    def test_a_model_that_scales_were_added_to(self, models, serve, tmp_path):
        _, folder = models("llama")
        copy = shutil.copytree(folder, tmp_path / "copy")
        scales = make_scales("head")
        scales.save_pretrained(copy, format="compressed-tensors", overwrite=True)
        for index, (k, v) in enumerate(loaded_scales(serve(str(copy), "fp8"))):
            assert torch.equal(k, scales.layers[index].k[:, 0])
            assert torch.equal(v, scales.layers[index].v[:, 0])

    def test_per_head(self, models, serve, tmp_path):
        _, folder = models("llama")
        scales = make_scales("head")
        copy = tmp_path / "copy"
        scales.save_pretrained(copy, format="compressed-tensors", checkpoint=folder)
        for index, (k, v) in enumerate(loaded_scales(serve(str(copy), "fp8"))):
            assert k.shape == v.shape == (HEADS,)
            assert torch.equal(k, scales.layers[index].k[:, 0])
            assert torch.equal(v, scales.layers[index].v[:, 0])


@pytest.mark.parametrize("granularity", ["tensor", "head"])
def test_a_checkpoints_own_scales(models, prompts, serve, tmp_path, granularity):
    """A dtype with static scales takes those of the checkpoint that is served."""
    model, folder = models("llama")
    scales = make_scales(granularity)
    copy = tmp_path / "copy"
    scales.save_pretrained(copy, format="compressed-tensors", checkpoint=folder)
    tokens, _ = generate(serve(str(copy), "hf_fp8kv_static"), prompts)
    assert tokens == generate_here(model, prompts, scales=KVScales.from_pretrained(copy))
