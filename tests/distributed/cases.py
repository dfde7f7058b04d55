"""The cases of the distributed tests, which every process runs in this order.

A case receives a model and the keyword `tensor_parallel` for its part of the model, or `{}` for the
whole model. It returns a value that JSON can represent.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import hf_fp8kv
from hf_fp8kv import FP8PagedCache, KVScales, LayerScales, calibrate, check_model, serving
from hf_fp8kv.modeling.tensor_parallel import TensorParallel
from tests.helpers.serving_tools import batched, prompts
from tests.helpers.tiny_models import prompt, tiny

LAYERS, DIM = 2, 16
# The number of tokens is even, because some versions of transformers split only even numbers.
VOCAB = 96
SIZES = {"vocab_size": VOCAB}
# Query heads and KV heads, or a type and options.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "4q-2kv": ("llama", {}),
    "8q-4kv": ("llama", {"num_attention_heads": 8, "num_key_value_heads": 4}),
    "4q-4kv": ("llama", {"num_key_value_heads": 4}),
    "biased-keys": ("qwen2", {"key_bias": 4.0}),
    # The plan of this model gathers K and V, so every process holds all heads.
    "gathered": ("olmo2", {}),
    "one-head": ("llama", {"num_key_value_heads": 1}),
    # The projection of latents is split. The latents are not.
    "latents": ("deepseek_v2", {}),
}
GREEDY = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}

Ranks = dict[str, TensorParallel]
Case = Callable[[Any, Ranks, Path], Any]


def save_models(folder: Path) -> None:
    for name, (kind, options) in MODELS.items():
        model, _ = tiny(kind, **SIZES, **options)
        model.save_pretrained(folder / name)
        # Scales next to the weights, for from_pretrained.
        scales("head", model).save_pretrained(folder / name)
        save_tokenizer(folder / name)
        (folder / name / "ranks").mkdir()
        for ranks in (1, 2):
            write_json(folder / name / "ranks" / f"{ranks}.json", ranks)


def save_tokenizer(folder: Path) -> None:
    """Save a tokenizer with a token for each word of a sentence, and one for unknown words."""
    vocabulary = {word: i for i, word in enumerate(["?", "London", "is", "the", "capital", "of"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?").save_pretrained(folder)


def load(folder: Path, name: str, **keywords: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder / name, **keywords).eval()


# -- scales --------------------------------------------------------------------------------------


def scales(kind: str, model: Any) -> KVScales:
    """Return scales that differ by layer, side and head. Some values saturate."""
    heads = model.config.num_key_value_heads
    generator = torch.Generator().manual_seed(5)
    shapes = {"tensor": (), "head": (heads, 1), "channel": (heads, DIM), "centers": (heads, 1)}

    def draw(base: float) -> torch.Tensor:
        return base * (0.3 + torch.rand(shapes[kind], generator=generator)) / 448

    def layer() -> LayerScales:
        center = torch.randn(heads, DIM, generator=generator) if kind == "centers" else None
        return LayerScales(draw(2.0), draw(1.5), center)

    return KVScales({index: layer() for index in range(LAYERS)})


def scales_of_ranks(ranks: int) -> list[dict[str, float]]:
    """Return a scale for each rank and layer, as in vLLM's JSON."""
    values = torch.rand(ranks, LAYERS, generator=torch.Generator().manual_seed(6))
    return [{str(i): (0.5 + 3 * x) / 448 for i, x in enumerate(row)} for row in values.tolist()]


def write_json(path: Path, ranks: int) -> None:
    factors = {str(rank): layers for rank, layers in enumerate(scales_of_ranks(ranks))}
    cache = {"dtype": "float8_e4m3fn", "scaling_factor": factors}
    path.write_text(json.dumps({"model_type": None, "kv_cache": cache}))


def as_heads(ranks: int, heads: int) -> KVScales:
    """Return the scales of all ranks for a process that has all heads."""
    rank_scales = scales_of_ranks(ranks)

    def layer(index: int) -> LayerScales:
        column = torch.tensor([layers[str(index)] for layers in rank_scales])
        column = column.repeat_interleave(heads // ranks)[:, None]
        return LayerScales(column, column.clone())

    return KVScales({index: layer(index) for index in range(LAYERS)})


# -- generation ----------------------------------------------------------------------------------


def generate(model: Any, cache: Any, **keywords: Any) -> list[list[int]]:
    """Generate two greedy rows. The first row starts with padding."""
    out = model.generate(**prompt(), past_key_values=cache, **{**GREEDY, **keywords})
    return out.tolist()


def generate_case(attention: str, kind: str | None, **keywords: Any) -> Case:
    """Return a case for `generate()` with an attention, a kind of scales and cache keywords."""

    def run(model: Any, ranks: Ranks, work: Path) -> Any:
        model.set_attn_implementation(attention)
        cache_scales = None if kind is None else scales(kind, model)
        cache = FP8PagedCache(model.config, scales=cache_scales, **{**STORED, **keywords}, **ranks)
        tokens = generate(model, cache)
        return {"tokens": tokens, "heads": cache.layers[0].store.pool.heads}

    return run


STORED = {"prefill": "stored", "page_size": 8}


def beams_and_forks(model: Any, ranks: Ranks, work: Path) -> Any:
    cache = FP8PagedCache(model.config, scales=scales("head", model), **STORED, **ranks)
    first_tokens = generate(model, cache, max_new_tokens=4)
    fork = cache.fork()
    inputs = {"input_ids": torch.tensor(first_tokens), "attention_mask": torch.ones(2, 17).long()}
    inputs["attention_mask"][0, :3] = 0
    continuations = [
        model.generate(**inputs, past_key_values=each, **{**GREEDY, "max_new_tokens": new}).tolist()
        for each, new in ((fork, 6), (cache, 8))
    ]
    new = FP8PagedCache(model.config, scales=scales("head", model), **STORED, **ranks)
    return [first_tokens, *continuations, generate(model, new, num_beams=3)]


def save_and_load(model: Any, ranks: Ranks, work: Path) -> Any:
    """Save the cache of a prompt in a file of each process, load it, and continue the text."""
    cache = FP8PagedCache(model.config, scales=scales("head", model), **STORED, **ranks)
    inputs = prompt()
    with torch.no_grad():
        model(**{name: x[:, :9] for name, x in inputs.items()}, past_key_values=cache)
    path = cache.save(work / f"cache-{os.environ.get('RANK', 'alone')}.safetensors")
    loaded = FP8PagedCache.load(path)
    assert loaded.options.tensor_parallel == ranks.get("tensor_parallel", (0, 1))
    return generate(model, loaded)


def latents_case(**keywords: Any) -> Case:
    """Return a case with latents, which each process stores in full. It also returns the path."""

    def run(model: Any, ranks: Ranks, work: Path) -> Any:
        cache = FP8PagedCache(model.config, **{**STORED, **keywords}, **ranks)
        return [generate(model, cache), cache.layers[0].store.pool.heads, check_model(model).path]

    return run


def enabled(model: Any, ranks: Ranks, work: Path) -> Any:
    """Use `enable`, which reads the rank from the model."""
    hf_fp8kv.enable(model, scales=scales("head", model), **STORED)
    try:
        return generate(model, None)
    finally:
        hf_fp8kv.disable(model)


def from_checkpoint(model: Any, ranks: Ranks, work: Path) -> Any:
    folder = model.config._name_or_path
    cache = FP8PagedCache.from_pretrained(folder, config=model.config, **STORED, **ranks)
    return generate(model, cache)


def json_case(count: int) -> Case:
    """Return a case with vLLM's JSON with the scales of `count` ranks."""

    def run(model: Any, ranks: Ranks, work: Path) -> Any:
        file_scales = json_file(model, ranks, count)
        return generate(model, FP8PagedCache(model.config, scales=file_scales, **STORED, **ranks))

    return run


def json_file(model: Any, ranks: Ranks, count: int) -> Any:
    """Return the path of the JSON, or scales per head for a process that has all ranks' heads."""
    if not ranks and count > 1:
        return as_heads(count, model.config.num_key_value_heads)
    return Path(model.config._name_or_path) / "ranks" / f"{count}.json"


def serve_case(kind: str | int, **config: Any) -> Case:
    """Return a case for `generate_batch`. An int is the number of ranks in vLLM's JSON."""

    def run(model: Any, ranks: Ranks, work: Path) -> Any:
        if isinstance(kind, int):
            engine_scales: Any = json_file(model, ranks, kind)
        else:
            engine_scales = scales(kind, model)
        serving.enable(model, scales=engine_scales)
        try:
            return batched(model, prompts(VOCAB), **config)
        finally:
            serving.disable(model)

    return run


def other_ranks_scales(model: Any, ranks: Ranks, work: Path) -> Any:
    """Use the scales of rank 0's heads in every process, which is wrong in rank 1."""
    wrong_ranks = {"tensor_parallel": TensorParallel(0, 2)} if ranks else {}
    cache = FP8PagedCache(model.config, scales=scales("head", model), **STORED, **wrong_ranks)
    return generate(model, cache)


def ranks_of(model: Any, ranks: Ranks, work: Path) -> Any:
    return hf_fp8kv.tensor_parallel(model)


def report(model: Any, ranks: Ranks, work: Path) -> Any:
    return check_model(model).to_dict()


# -- errors --------------------------------------------------------------------------------------


def failed(call: Callable[[], Any]) -> str:
    """Return the class and the message of the error that a call raises, or ""."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def refused_case(**keywords: Any) -> Case:
    """Return a case with a refused cache: its error, its contents, and a valid cache's tokens."""

    def run(model: Any, ranks: Ranks, work: Path) -> Any:
        cache = FP8PagedCache(model.config, scales=scales("head", model), **STORED, **keywords)
        error = failed(lambda: generate(model, cache))
        stored = [cache.host_length(), cache.memory_footprint().total_bytes]
        valid = FP8PagedCache(model.config, scales=scales("head", model), **STORED, **ranks)
        return {"error": error, "stored": stored, "tokens": generate(model, valid)}

    return run


def uneven(model: Any, ranks: Ranks, work: Path) -> Any:
    return [
        failed(lambda: hf_fp8kv.tensor_parallel(model)),
        failed(lambda: hf_fp8kv.enable(model)),
        failed(lambda: serving.enable(model)),
        failed(lambda: FP8PagedCache(model.config, tensor_parallel=TensorParallel(0, 2))),
    ]


def calibrated(model: Any, ranks: Ranks, work: Path) -> Any:
    return failed(lambda: calibrate(model, [[5, 6, 7, 8] * 8], progress=False))


# -- all cases -----------------------------------------------------------------------------------

# Cases whose tokens in every process equal the tokens of one process. Grid: Each kind of attention,
# scales and cache with a model whose heads are split.
EQUAL: dict[str, tuple[str, Case]] = {
    **{
        f"{model}, {attention}, per head": (model, generate_case(attention, "head"))
        for model, attention in (
            ("4q-2kv", "fp8_paged"), ("8q-4kv", "fp8_paged"), ("4q-4kv", "fp8_paged"),
            ("biased-keys", "fp8_paged"), ("8q-4kv", "sdpa"), ("biased-keys", "eager"),
        )
    },
    "per tensor": ("8q-4kv", generate_case("fp8_paged", "tensor")),
    "per channel": ("4q-2kv", generate_case("fp8_paged", "channel")),
    "centers": ("8q-4kv", generate_case("fp8_paged", "centers")),
    "dynamic": ("4q-2kv", generate_case("fp8_paged", None)),
    "dynamic, center of the first call": (
        "biased-keys", generate_case("fp8_paged", None, plan="fp8_e3m4 centered"),
    ),
    "unquantized keys": ("4q-2kv", generate_case("fp8_paged", "head", key_dtype="auto")),
    "exact prefill": ("4q-2kv", generate_case("fp8_paged", "head", prefill="exact")),
    "preallocated": ("4q-2kv", generate_case("fp8_paged", "head", max_cache_len=40)),
    "backend torch": ("4q-2kv", generate_case("fp8_paged", "head", backend="torch")),
    "gathered heads": ("gathered", generate_case("fp8_paged", "head")),
    "forks and beams": ("8q-4kv", beams_and_forks),
    "a cache in files": ("8q-4kv", save_and_load),
    "enable": ("8q-4kv", enabled),
    "from_pretrained": ("8q-4kv", from_checkpoint),
    "vLLM's JSON, a rank each": ("8q-4kv", json_case(2)),
    "vLLM's JSON, one rank": ("8q-4kv", json_case(1)),
    **{
        f"latents, {keywords or 'default'}": ("latents", latents_case(**keywords))
        for keywords in ({}, {"dtype": "auto", "max_cache_len": 40})
        if "latents" in MODELS
    },
    "generate_batch, chunked, centers": ("biased-keys", serve_case("centers", max_batch_tokens=16)),
    "generate_batch, vLLM's JSON, a rank each": ("8q-4kv", serve_case(2)),
}  # fmt: skip
CASES: dict[str, tuple[str, Case]] = {
    **EQUAL,
    "other rank's scales": ("8q-4kv", other_ranks_scales),
    "ranks": ("8q-4kv", ranks_of),
    "ranks, gathered heads": ("gathered", ranks_of),
    "report": ("8q-4kv", report),
    "scales of all heads, no ranks": ("8q-4kv", refused_case()),
    "ranks, heads not split": ("gathered", refused_case(tensor_parallel=TensorParallel(0, 2))),
    "uneven heads": ("one-head", uneven),
    "calibrate": ("8q-4kv", calibrated),
}
