"""Tests of reading files that quantization tools wrote for tiny models.

The files are in `tests/data/tools/TOOL-VERSION/LAYOUT`. `make tools` writes them again. The tables
in this module name the tensors that contain the expected values.
"""

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hf_fp8kv.scales import KVScales
from tests.scales.test_sources import scale_error

DATA = Path(__file__).parents[1] / "data" / "tools"
ATTENTION_NAME = "self_attn.{}_scale"
PROJECTION_NAME = "self_attn.{0}_proj.{0}_scale"
OUTPUT_NAME = "self_attn.{}_proj.output_scale"
BEFORE_ROPE = "Quark measured the scales of K before RoPE"
ALL_ONES = "every KV scale is exactly 1.0"


# Each folder has a format, the name of a scale in a layer ("{}" stands for k or v), and optionally
# the start of a warning.
AUTO_ROUND = {
    "llama-attn-llmc": ("compressed-tensors", ATTENTION_NAME),
    "llama-fp8-ar": ("autofp8", ATTENTION_NAME),
    "llama-w4-ar": ("autofp8", ATTENTION_NAME),
    "llama-fp8-llmc": ("compressed-tensors", ATTENTION_NAME),
}
LLM_COMPRESSOR = dict.fromkeys(
    (
        "llama-fp8-kv", "llama-kv", "llama-kv-heads", "llama-kv-r3", "llama-w4a16-kv", "phi3-kv",
        "qwen3-kv",
    ),
    ("compressed-tensors", ATTENTION_NAME),
)  # fmt: skip
MODELOPT = {
    **dict.fromkeys(
        (
            "gemma3-fp8-kv", "gemma3vl-fp8-kv", "llama-fp8-kv", "llama-fp8-qkv", "llama-kv",
            "llama-kv-asis", "llava-fp8-kv", "phi3-fp8-kv", "qwen2-fp8-kv", "qwen2-nvfp4-kv",
            "qwen25vl-fp8-kv", "qwen3-int8-kv", "qwen3moe-fp8-kv", "qwen3vl-fp8-kv", "smol-kv",
        ),
        ("modelopt", PROJECTION_NAME),
    ),
    "llama-fp8-affine": ("modelopt", PROJECTION_NAME),
    "llama-trtllm": ("trtllm", "attention.{}_cache_scaling_factor", ALL_ONES),
    "llama-trtllm-tp2": ("trtllm", "attention.{}_cache_scaling_factor", ALL_ONES),
}  # fmt: skip
QUARK = {
    **dict.fromkeys(
        (
            "llama-fp8-attn", "llama-fp8-kv-quark", "llama-int4-kv", "llama-mxfp4-kv",
            "llama-minscale", "qwen3-fp8-kv", "qwen3moe-fp8-kv", "smol-fp8-kv",
        ),
        ("quark", OUTPUT_NAME, BEFORE_ROPE),
    ),
    "phi3-fp8-kv": ("quark", "self_attn.qkv_proj.output_scale", BEFORE_ROPE),
    "llama-fp8-kv-postrope": ("quark", OUTPUT_NAME),
    "llama-fp8-kv": ("autofp8", ATTENTION_NAME),
    "qwen2-fp8-kv": ("autofp8", ATTENTION_NAME),
    "llama-fp8-kv-postrope-fp8mode": ("autofp8", OUTPUT_NAME),
}  # fmt: skip
TOOLS = {
    "auto-round-0.15.1": AUTO_ROUND, "llm-compressor-0.14.0.1": LLM_COMPRESSOR,
    "modelopt-0.47.0": MODELOPT, "quark-0.13": QUARK,
}  # fmt: skip
READABLE_FOLDERS = {
    f"{tool}/{name}": row for tool, rows in TOOLS.items() for name, row in rows.items()
}
REFUSED_FOLDERS = {
    "auto-round-0.15.1/llama-w4-ar-zeros": "K scale .*got 0.0",
    "llm-compressor-0.14.0.1/llama-kv-dynamic": "dynamic, which needs no scales",
    "llm-compressor-0.14.0.1/llama-kv-int4": r"4-bit int \(INT4\)",
    "llm-compressor-0.14.0.1/llama-kv-r3-random": "R3: K rotated by type 'random-hadamard'",
    "llm-compressor-0.14.0.1/llama-kv-int8": r"8-bit int \(INT8\)",
    "modelopt-0.47.0/llama-fp8-cast": "got none. .* static, so servers use 1.0",
    "modelopt-0.47.0/llama-fp8-nvfp4affine": "'NVFP4_AFFINE'",
    "modelopt-0.47.0/llama-fp8-nvfp4kv": "'NVFP4'",
    "modelopt-0.47.0/llama-fp8w": "got none. The config declares nothing about a KV cache",
    "quark-0.13/llama-fp8w": "got none. The config declares nothing about a KV cache",
    "quark-0.13/llama-fp8w-fp8mode": "got none. The config declares nothing about a KV cache",
}


def read_tool_scales(folder: Path, suffix: str, side: str) -> dict[int, torch.Tensor]:
    """Return the largest scale or bias of each layer, over all tensors that end in `suffix`."""
    pattern = re.compile(rf".*\blayers\.([0-9]+)\.{re.escape(suffix.format(side))}")
    scales: dict[int, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        for name, tensor in load_file(path).items():
            if (match := pattern.fullmatch(name)) is not None:
                index = int(match[1])
                scale = tensor.float().squeeze()
                scales[index] = torch.maximum(scales.get(index, scale), scale)
    return scales


@pytest.mark.parametrize("name", READABLE_FOLDERS)
def test_the_scales_of_the_tool_are_read(caplog, name):
    format, tensor_name, *warnings = READABLE_FOLDERS[name]
    scales = KVScales.from_pretrained(DATA / name)
    assert scales.format == format
    assert (scales.plan is not None) == name.endswith("-r3")  # the scales are for rotated K
    for side in "kv":
        expected = read_tool_scales(DATA / name, tensor_name, side)
        biases = read_tool_scales(DATA / name, "self_attn.{0}_proj.{0}_bias", side)
        assert len(expected) >= 3
        for index, layer in scales.layers.items():
            if side == "v" and biases:  # V is stored unchanged
                expected[index] = expected[index] + biases[index].abs() / 448
            elif biases:
                assert torch.equal(layer.k_center, biases[index])
        actual = {index: getattr(layer, side).squeeze() for index, layer in scales.layers.items()}
        assert actual.keys() == expected.keys()
        assert all(actual[index].tolist() == scale.tolist() for index, scale in expected.items())
    messages = {record.getMessage().split(": ", 1)[1] for record in caplog.records}
    assert bool(warnings) == bool(messages)
    assert all(message.startswith((BEFORE_ROPE, ALL_ONES)) for message in messages)
    assert all(any(text.startswith(start) for text in messages) for start in warnings)


@pytest.mark.parametrize("name", REFUSED_FOLDERS)
def test_folders_without_usable_scales_are_refused(name):
    with scale_error(REFUSED_FOLDERS[name]):
        KVScales.from_pretrained(DATA / name)


def test_every_folder_is_in_a_table():
    folders = {str(path.parent.relative_to(DATA)) for path in DATA.glob("*/*/config.json")}
    assert folders == {*READABLE_FOLDERS, *REFUSED_FOLDERS}
    assert sum(path.stat().st_size for path in DATA.rglob("*") if path.is_file()) < 300_000
