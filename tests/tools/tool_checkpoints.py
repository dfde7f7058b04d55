"""Write the golden files of tests/data/tools, each with its tool: `make tools`.

    python tests/tools/tool_checkpoints.py llm-compressor tests/data/tools

The program runs in an environment of the tool, and does not import hf_fp8kv. A layout is a tiny
checkpoint that the tool saves with certain options. Its model has random weights, and is calibrated
on random tokens. The checkpoint's configs and scale tensors are copied to `TOOL-VERSION/LAYOUT`.
"""

import importlib.metadata
import logging
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

CONFIG_FIELDS = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2,
    "max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2,
}  # fmt: skip
CONFIG_FILES = ("config.json", "hf_quant_config.json")
SCALE_NAME = re.compile(
    r".*\b(?:self_attn|attention)\.(?!.*(?:weights?_|input_|dense))"
    r".*(?:scale|scaling_factor|zero_point|[kv]_proj\.[kv]_bias)"
)
# Saves a checkpoint to a folder, with some options.
Saver = Callable[..., object]
# A tool's `Saver`, and for each layout the options that the saver gets.
Layouts = tuple[Saver, dict[str, dict[str, Any]]]


def make_model(model_type: str) -> PreTrainedModel:
    """Return a tiny model of a model type, with the same random weights in every run."""
    torch.manual_seed(0)
    fields = CONFIG_FIELDS if model_type == "phi3" else {**CONFIG_FIELDS, "head_dim": 32}
    config = AutoConfig.for_model(model_type, **fields)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    model.config.architectures = [type(model).__name__]
    return model


def save_model(model_type: str, folder: Path) -> Path:
    """Save a tiny model and a tokenizer, for tools that load files. Return the folder."""
    word_tokenizer = Tokenizer(WordLevel({str(i): i for i in range(512)}, unk_token="0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=word_tokenizer, pad_token="2")
    make_model(model_type).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_tokens() -> torch.Tensor:
    """Return the tokens for calibration, `[8, 64]`, int64."""
    return torch.randint(3, 512, (8, 64), generator=torch.Generator().manual_seed(1))


def copy_scales(checkpoint: Path, target: Path) -> None:
    """Replace a folder with the configs of a checkpoint, and the scale tensors of its files."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for path in sorted(checkpoint.iterdir()):
        if path.name in CONFIG_FILES:
            shutil.copyfile(path, target / path.name)
        elif path.suffix == ".safetensors":
            tensors = load_file(path)
            scales = {
                name: tensor for name, tensor in tensors.items() if SCALE_NAME.fullmatch(name)
            }
            if scales:
                save_file(scales, target / path.name)


def make_auto_round_layouts() -> Layouts:
    from auto_round import AutoRound

    def save(folder: Path, export_format: str, scheme: str = "FP8_STATIC", **options: str) -> None:
        original = save_model("llama", folder / "original")
        samples = [{"input_ids": row[None]} for row in make_tokens()]
        quantizer = AutoRound(
            str(original), scheme=scheme, iters=0, nsamples=8, seqlen=64, dataset=samples,
            device_map="cpu", **options,
        )  # fmt: skip
        quantizer.quantize_and_save(str(folder / "saved"), format=export_format)
        for path in folder.glob("saved/*/*"):
            path.rename(folder / path.name)

    auto_round = {"export_format": "auto_round", "static_kv_dtype": "fp8"}
    return save, {
        "llama-fp8-ar": auto_round,
        "llama-fp8-llmc": {"export_format": "llm_compressor", "static_kv_dtype": "fp8"},
        "llama-attn-llmc": {"export_format": "llm_compressor", "static_attention_dtype": "fp8"},
        "llama-w4-ar": {**auto_round, "scheme": "W4A16"},
    }


def make_llm_compressor_layouts() -> Layouts:
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform import SpinQuantModifier

    fp8_scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
    fp8_scheme["symmetric"] = True

    def save(
        folder: Path, model_type: str = "llama", weights: str = "", rotation: str = "",
        **cache: object,
    ) -> None:  # fmt: skip
        original = save_model(model_type, folder / "original")
        options: dict[str, object] = {"kv_cache_scheme": fp8_scheme | cache}
        if weights:
            options |= {"targets": "Linear", "scheme": weights, "ignore": ["lm_head"]}
        recipe = [QuantizationModifier(**options)]
        if rotation:
            # R3 of SpinQuant rotates K and the queries after RoPE.
            recipe.insert(0, SpinQuantModifier(rotations=["R3"], transform_type=rotation))
        samples = Dataset.from_dict({"input_ids": make_tokens().tolist()})
        oneshot(
            model=str(original), output_dir=str(folder), dataset=samples, recipe=recipe,
            num_calibration_samples=len(samples), max_seq_length=64,
        )  # fmt: skip

    return save, {
        "llama-kv": {},
        "llama-fp8-kv": {"weights": "FP8"},
        "llama-w4a16-kv": {"weights": "W4A16"},
        "llama-kv-heads": {"strategy": "attn_head"},
        "qwen3-kv": {"model_type": "qwen3"},
        "phi3-kv": {"model_type": "phi3"},
        "llama-kv-dynamic": {"dynamic": True},
        "llama-kv-int8": {"type": "int"},
        "llama-kv-r3": {"rotation": "hadamard"},
        "llama-kv-r3-random": {"rotation": "random-hadamard"},
        "llama-kv-int4": {"type": "int", "num_bits": 4},
    }


def make_quark_layouts() -> Layouts:
    from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors

    def save(
        folder: Path, model_type: str = "llama", scheme: str = "fp8", mode: str = "quark",
        post_rope: bool = False, **options: object,
    ) -> None:  # fmt: skip
        template = LLMTemplate.get(model_type)
        config = template.get_config(scheme=scheme, **{"kv_cache_scheme": "fp8"} | options)
        config.kv_cache_post_rope = post_rope
        quantizer = ModelQuantizer(config)
        samples = [row[None] for row in make_tokens()]
        model = quantizer.quantize_model(make_model(model_type), samples)
        export_safetensors(quantizer.freeze(model), folder, custom_mode=mode)

    return save, {
        "llama-fp8-kv": {"mode": "fp8"},
        "llama-fp8-kv-quark": {},
        "llama-fp8-kv-postrope": {"post_rope": True},
        "llama-fp8-kv-postrope-fp8mode": {"mode": "fp8", "post_rope": True},
        "llama-fp8-attn": {"attention_scheme": "fp8"},
        "llama-minscale": {"min_kv_scale": 1.0},
        "llama-int4-kv": {"scheme": "int4_wo_32"},
        "llama-mxfp4-kv": {"scheme": "mxfp4"},
        "llama-fp8w": {"kv_cache_scheme": None},
        "llama-fp8w-fp8mode": {"mode": "fp8", "kv_cache_scheme": None},
        "phi3-fp8-kv": {"model_type": "phi3"},
        "qwen2-fp8-kv": {"model_type": "qwen2", "mode": "fp8"},
        "qwen3-fp8-kv": {"model_type": "qwen3"},
    }


def make_modelopt_layouts() -> Layouts:
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint, export_tensorrt_llm_checkpoint

    def run_calibration(model: PreTrainedModel) -> None:
        for row in make_tokens():
            model(row[None])

    def save(
        folder: Path, model_type: str = "llama", weights: str = "FP8_DEFAULT",
        cache: str = "FP8", num_ranks: int = 0,
    ) -> None:  # fmt: skip
        config = getattr(mtq, f"{weights}_CFG") if weights else {}
        if cache:
            cache_config = getattr(mtq, f"{cache}_KV_CFG")["quant_cfg"]
            config = mtq.update_quant_cfg_with_kv_cache_quant(config, cache_config)
        model = mtq.quantize(make_model(model_type), config, run_calibration)
        if num_ranks:
            export_tensorrt_llm_checkpoint(
                model, model_type, torch.bfloat16, folder, inference_tensor_parallel=num_ranks
            )
        else:
            export_hf_checkpoint(model, export_dir=folder)

    return save, {
        "llama-kv": {"weights": ""},
        "llama-fp8-kv": {},
        "llama-fp8w": {"cache": ""},
        "llama-fp8-affine": {"cache": "FP8_AFFINE"},
        "llama-fp8-nvfp4kv": {"cache": "NVFP4"},
        "llama-fp8-nvfp4affine": {"cache": "NVFP4_AFFINE"},
        "llama-trtllm": {"num_ranks": 1},
        "llama-trtllm-tp2": {"num_ranks": 2},
        "phi3-fp8-kv": {"model_type": "phi3"},
        "qwen2-fp8-kv": {"model_type": "qwen2"},
        "qwen2-nvfp4-kv": {"model_type": "qwen2", "weights": "NVFP4_DEFAULT"},
        "qwen3-int8-kv": {"model_type": "qwen3", "weights": "INT8_SMOOTHQUANT"},
    }


# For each tool, the package whose version is in the folder's name, and a function that returns the
# tool's layouts.
TOOLS: dict[str, tuple[str, Callable[[], Layouts]]] = {
    "auto-round": ("auto-round", make_auto_round_layouts),
    "llm-compressor": ("llmcompressor", make_llm_compressor_layouts),
    "modelopt": ("nvidia-modelopt", make_modelopt_layouts),
    "quark": ("amd-quark", make_quark_layouts),
}


def main(tool: str, target: Path) -> int:
    """Write all layouts of a tool. Return the number of failed layouts."""
    package, make_layouts = TOOLS[tool]
    folder = target / f"{tool}-{importlib.metadata.version(package)}"
    save, layouts = make_layouts()
    num_failed = 0
    for name, options in layouts.items():
        with tempfile.TemporaryDirectory() as checkpoint:
            try:
                save(Path(checkpoint), **options)
                copy_scales(Path(checkpoint), folder / name)
            except Exception:
                logging.exception("%s: %s was not written", tool, name)
                num_failed += 1
    return num_failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
