"""Write the golden checkpoints next to this file: `python tests/data/scales/make.py`.

Each folder has the tensor names, shapes, dtypes and config fields that one tool writes, and little
else. The scales of K and V are the first scales in two files that vLLM uses in its tests (Llama 2
7B and 70B). They differ, so code that confuses K with V fails.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

FOLDER = Path(__file__).parent
K_SCALES = (0.0152239128947258, 0.0188860222697258, 0.0354178324341774)
V_SCALES = (0.0230364128947258, 0.01979283057153225, 0.0241350457072258)
LLAMA_CONFIG = {"model_type": "llama", "num_hidden_layers": 3, "num_key_value_heads": 2}
KV_CACHE_SCHEME = {
    "num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False,
    "group_size": None, "observer": "minmax",
}  # fmt: skip
FP8_CONFIG = {"quant_method": "fp8", "activation_scheme": "static", "kv_cache_scheme": "static"}
Tensors = dict[str, torch.Tensor]


def make_scales(k_name: str, v_name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensors:
    """Return the scales of K and V of each layer, as tensors with these names."""
    tensors = {}
    for layer, (k, v) in enumerate(zip(K_SCALES, V_SCALES, strict=True)):
        tensors[f"model.layers.{layer}.{k_name}"] = torch.full(shape, k, dtype=dtype)
        tensors[f"model.layers.{layer}.{v_name}"] = torch.full(shape, v, dtype=dtype)
    return tensors


def make_shared_scales(prefix: str, suffix: str, shape: tuple[int, ...]) -> Tensors:
    """Return one scale per layer for both K and V: the larger of their two scales."""
    scales = [max(k, v) for k, v in zip(K_SCALES, V_SCALES, strict=True)]
    return {f"{prefix}.{i}.{suffix}": torch.full(shape, scale) for i, scale in enumerate(scales)}


def write_folder(name: str, config: dict[str, object], *shards: Tensors) -> None:
    """Write a folder with a config and a file of tensors, or several files and their index."""
    folder = FOLDER / name
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(LLAMA_CONFIG | config, indent=1) + "\n")
    unrelated = {"model.layers.0.self_attn.k_proj.weight_scale": torch.tensor(7.0)}
    if len(shards) == 1:
        save_file(unrelated | shards[0], folder / "model.safetensors")
        return
    files = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    weight_map = {}
    for file, tensors in zip(files, shards, strict=True):
        save_file(tensors, folder / file)
        weight_map |= dict.fromkeys(tensors, file)
    index = {"metadata": {"total_size": 24}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")


def write_json_folder(
    name: str, model_type: str | None, scales: dict[str, tuple[float, ...]]
) -> None:
    """Write a folder with a kv_cache_scales.json. `scales` has the scales of layers by rank."""
    folder = FOLDER / name
    folder.mkdir(exist_ok=True)
    factors = {
        rank: {str(i): scale for i, scale in enumerate(layers)} for rank, layers in scales.items()
    }
    kv_cache = {"dtype": "float8_e4m3fn", "scaling_factor": factors}
    content = {"model_type": model_type, "kv_cache": kv_cache}
    (folder / "kv_cache_scales.json").write_text(json.dumps(content, indent=4) + "\n")


def main() -> None:
    """Write all folders."""
    f32, f16, bf16 = torch.float32, torch.float16, torch.bfloat16
    scale_names = ("self_attn.k_scale", "self_attn.v_scale")
    output_names = ("self_attn.k_proj.output_scale", "self_attn.v_proj.output_scale")
    compressed = {"quant_method": "compressed-tensors", "config_groups": {}}

    write_json_folder("vllm", "llama", {"0": K_SCALES})
    write_json_folder("vllm-rank0", "llama", {"rank0": V_SCALES})
    write_json_folder("vllm-two-ranks", None, {"0": K_SCALES, "1": V_SCALES})
    write_folder("tgi", {}, make_scales(*scale_names, (), f32))
    shared_scales = make_shared_scales("model.layers", "self_attn.kv_scale", ())
    write_folder("tgi-kv", {"kv_cache_torch_dtype": "float8_e4m3fn"}, shared_scales)
    write_folder("tgi-kv-written", {"kv_cache_dtype": "float8_e4m3fn"}, shared_scales)
    write_folder("tgi-kv-fnuz", {"kv_cache_torch_dtype": "float8_e4m3fnuz"}, shared_scales)
    write_folder("autofp8", {"quantization_config": FP8_CONFIG}, make_scales(*scale_names, (), f32))
    write_folder("autofp8-kv", {"quantization_config": FP8_CONFIG}, shared_scales)
    config = {"quantization_config": compressed | {"kv_cache_scheme": KV_CACHE_SCHEME}}
    write_folder("compressed-tensors", config, make_scales(*scale_names, (1,), bf16))
    old_config = {"compression_config": compressed | {"kv_cache_scheme": KV_CACHE_SCHEME}}
    write_folder("compressed-tensors-old", old_config, make_scales(*scale_names, (1,), f16))
    per_head = {}
    for name, tensor in make_scales(*scale_names, (2, 1, 1), torch.float64).items():
        per_head[name] = tensor * torch.tensor([1.0, 2.0]).view(2, 1, 1)
    scheme = KV_CACHE_SCHEME | {"strategy": "attn_head"}
    config = {"quantization_config": compressed | {"kv_cache_scheme": scheme}}
    tensors = sorted(per_head.items())
    shards = dict(tensors[:3]), dict(tensors[3:])
    write_folder("compressed-tensors-heads", config, *shards)
    # ModelOpt writes neither `strategy` nor `symmetric`.
    modelopt = {"quant_method": "modelopt", "quant_algo": "FP8"}
    modelopt["kv_cache_scheme"] = {"dynamic": False, "num_bits": 8, "type": "float"}
    names = ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale")
    write_folder("modelopt", {"quantization_config": modelopt}, make_scales(*names, (), f32))
    output_config = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False}
    patterns = ["*k_proj", "*v_proj"]
    quark = {"quant_method": "quark", "export": {"kv_cache_group": patterns}}
    quark["layer_quant_config"] = {
        pattern: {"output_tensors": output_config} for pattern in patterns
    }
    write_folder("quark", {"quantization_config": quark}, make_scales(*output_names, (), f32))
    factors = make_shared_scales("transformer.layers", "attention.kv_cache_scaling_factor", (1,))
    write_folder("trtllm", {"quantization": {"kv_cache_quant_algo": "FP8"}}, factors)


if __name__ == "__main__":
    main()
