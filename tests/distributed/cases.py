"""Cases of the distributed tests. Each process runs all cases in the order of `CASES`.

A case is a function of a model, a dict with the keyword `tensor_parallel` (empty for a whole
model), and a folder for files. It returns a value that JSON can represent.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from transformers import AutoModelForCausalLM

import hf_fp8kv
from hf_fp8kv import FP8PagedCache, KVScales, LayerScales, calibrate, check_model, serving
from hf_fp8kv.calibration.plan_choice import resolve_plan
from hf_fp8kv.modeling.tensor_parallel import TensorParallel
from hf_fp8kv.serving import fp8_manager
from tests.helpers.serving_tools import draw_prompts, generate_batch, open_manager
from tests.helpers.tiny_models import build_variant, make_prompt

# The vocabulary size is even, because some versions of transformers split only even sizes.
VOCAB_SIZE = 96
MODEL_SIZES = {"vocab_size": VOCAB_SIZE}
# The type and the config options of each model, by its numbers of query and KV heads or a property.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "4q-2kv": ("llama", {}),
    "8q-4kv": ("llama", {"num_attention_heads": 8, "num_key_value_heads": 4}),
    "4q-4kv": ("llama", {"num_key_value_heads": 4}),
    "biased-keys": ("qwen2", {"key_bias": 4.0}),
    # The tensor-parallel plan of this model gathers K and V, so each process has all heads.
    "gathered": ("olmo2", {}),
    "one-head": ("llama", {"num_key_value_heads": 1}),
    # The projection of latents is split, but latents are not.
    "latents": ("deepseek_v2", {}),
}
GREEDY = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
STORED = {"prefill": "stored", "page_size": 8}

RankOptions = dict[str, TensorParallel]
Case = Callable[[Any, RankOptions, Path], Any]


def save_models(folder: Path) -> None:
    for name, (kind, options) in MODELS.items():
        model, _ = build_variant(kind, **MODEL_SIZES, **options)
        model.save_pretrained(folder / name)


def load_model(folder: Path, name: str, **keywords: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder / name, **keywords).eval()


def make_scales(kind: str, model: Any) -> KVScales:
    """Return scales that differ by layer, side and head. Some values of K and V saturate."""
    num_heads = model.config.num_key_value_heads
    generator = torch.Generator().manual_seed(5)
    head_shape = (num_heads, 1)
    channel_shape = (num_heads, 16)
    shapes = {
        "tensor": (), "head": head_shape, "channel": channel_shape, "centers": head_shape
    }  # fmt: skip

    def draw_scales(base: float) -> torch.Tensor:
        return base * (0.3 + torch.rand(shapes[kind], generator=generator)) / 448

    def make_layer() -> LayerScales:
        center = torch.randn(channel_shape, generator=generator) if kind == "centers" else None
        return LayerScales(draw_scales(2.0), draw_scales(1.5), center)

    return KVScales({index: make_layer() for index in range(2)})


def generate(model: Any, cache: Any, **keywords: Any) -> list[list[int]]:
    """Return the greedy tokens of two sequences. The first sequence starts with padding."""
    output = model.generate(**make_prompt(), past_key_values=cache, **{**GREEDY, **keywords})
    return output.tolist()


def make_generate_case(attention: str, kind: str | None, **keywords: Any) -> Case:
    """Return a case for `generate()` with an attention function and a kind of scales, or None."""

    def run(model: Any, rank_options: RankOptions, folder: Path) -> Any:
        model.set_attn_implementation(attention)
        scales = None if kind is None else make_scales(kind, model)
        cache = FP8PagedCache(model.config, scales=scales, **{**STORED, **keywords}, **rank_options)
        tokens = generate(model, cache)
        return {"tokens": tokens, "heads": cache.layers[0].pool.num_heads}

    return run


def save_and_load(model: Any, rank_options: RankOptions, folder: Path) -> Any:
    """Save the cache of a prompt to a file of each process, load it, and continue the sequence."""
    cache = FP8PagedCache(model.config, scales=make_scales("head", model), **STORED, **rank_options)
    inputs = make_prompt()
    with torch.no_grad():
        model(**{name: tensor[:, :9] for name, tensor in inputs.items()}, past_key_values=cache)
    path = cache.save(folder / f"cache-{os.environ.get('RANK', 'alone')}.safetensors")
    loaded_cache = FP8PagedCache.load(path)
    assert loaded_cache.options.tensor_parallel == rank_options.get("tensor_parallel", (0, 1))
    return generate(model, loaded_cache)


def make_latents_case(**keywords: Any) -> Case:
    """Return a case for latents, which each process stores completely, with the attention path."""

    def run(model: Any, rank_options: RankOptions, folder: Path) -> Any:
        cache = FP8PagedCache(model.config, **{**STORED, **keywords}, **rank_options)
        tokens = generate(model, cache)
        return [tokens, cache.layers[0].pool.num_heads, check_model(model).path]

    return run


def generate_enabled(model: Any, rank_options: RankOptions, folder: Path) -> Any:
    """Return the tokens with `enable`, which reads the rank from the model."""
    hf_fp8kv.enable(model, scales=make_scales("head", model), **STORED)
    try:
        return generate(model, None)
    finally:
        hf_fp8kv.disable(model)


def generate_batched(model: Any, rank_options: RankOptions, folder: Path) -> Any:
    serving.enable(model, scales=make_scales("centers", model))
    try:
        return generate_batch(model, draw_prompts(VOCAB_SIZE), max_batch_tokens=16)
    finally:
        serving.disable(model)


def get_rank(model: Any, rank_options: RankOptions, folder: Path) -> Any:
    return hf_fp8kv.tensor_parallel(model)


def get_hash_key(model: Any, rank_options: RankOptions, folder: Path) -> Any:
    """Return the key that identifies blocks. Each process has a different `PROCESS_KEY`."""
    serving.enable(model)
    try:
        with (
            patch.object(fp8_manager, "PROCESS_KEY", os.urandom(16)),
            open_manager(model) as manager,
        ):
            manager.warmup()
            return manager.batch_processor.cache.hash_key.hex()
    finally:
        serving.disable(model)


def describe_storage(model: Any, rank_options: RankOptions, folder: Path) -> Any:
    """Return the report of `check_model`, and whether the model has a chosen plan."""
    return {**check_model(model).to_dict(), "is_planned": bool(resolve_plan(model, {})["plan"])}


def catch_error(call: Callable[[], Any]) -> str:
    """Return the class and message of the error that a call raises, or "" without an error."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def make_refused_case(**keywords: Any) -> Case:
    """Return a case for the error and sizes of a refused cache, and the tokens of a valid cache."""

    def run(model: Any, rank_options: RankOptions, folder: Path) -> Any:
        options = {"scales": make_scales("head", model), **STORED}
        cache = FP8PagedCache(model.config, **options, **keywords)
        errors = [catch_error(lambda: generate(model, cache))]
        sizes = [cache.host_length(), cache.memory_footprint().total_bytes]
        valid_cache = FP8PagedCache(model.config, **options, **rank_options)
        return {"errors": errors, "stored": sizes, "tokens": generate(model, valid_cache)}

    return run


def catch_uneven_errors(model: Any, rank_options: RankOptions, folder: Path) -> Any:
    return [
        catch_error(lambda: hf_fp8kv.tensor_parallel(model)),
        catch_error(lambda: hf_fp8kv.enable(model)),
        catch_error(lambda: serving.enable(model)),
        catch_error(lambda: FP8PagedCache(model.config, tensor_parallel=TensorParallel(0, 2))),
    ]


def catch_calibration_error(model: Any, rank_options: RankOptions, folder: Path) -> Any:
    return [catch_error(lambda: calibrate(model, [[5, 6, 7, 8] * 8], progress=False))]


# Cases in which each process gives the tokens of one process with the whole model: all kinds of
# attention, scales and caches, with a model whose heads are split across processes.
EQUAL_CASES: dict[str, tuple[str, Case]] = {
    "fp8_paged, per head": ("8q-4kv", make_generate_case("fp8_paged", "head")),
    "sdpa, per head": ("8q-4kv", make_generate_case("sdpa", "head")),
    "eager, biased keys": ("biased-keys", make_generate_case("eager", "head")),
    "per tensor": ("4q-2kv", make_generate_case("fp8_paged", "tensor")),
    "per channel": ("4q-4kv", make_generate_case("fp8_paged", "channel")),
    "centers": ("8q-4kv", make_generate_case("fp8_paged", "centers")),
    "dynamic": ("4q-2kv", make_generate_case("fp8_paged", None, key_dtype="auto")),
    "exact prefill": ("4q-2kv", make_generate_case("fp8_paged", "head", prefill="exact")),
    "preallocated": (
        "4q-2kv", make_generate_case("fp8_paged", "head", max_cache_len=40, backend="torch"),
    ),
    "gathered heads": ("gathered", make_generate_case("fp8_paged", "head")),
    "a cache in files": ("8q-4kv", save_and_load),
    "enable": ("8q-4kv", generate_enabled),
    "latents": ("latents", make_latents_case()),
    "latents, preallocated": ("latents", make_latents_case(dtype="auto", max_cache_len=40)),
    "generate_batch, chunked, centers": ("biased-keys", generate_batched),
}  # fmt: skip
CASES: dict[str, tuple[str, Case]] = {
    **EQUAL_CASES,
    "ranks": ("8q-4kv", get_rank),
    "hash key": ("8q-4kv", get_hash_key),
    "ranks, gathered heads": ("gathered", get_rank),
    "storage": ("8q-4kv", describe_storage),
    "scales of all heads, no ranks": ("8q-4kv", make_refused_case()),
    "ranks, heads not split": ("gathered", make_refused_case(tensor_parallel=TensorParallel(0, 2))),
    "uneven heads": ("one-head", catch_uneven_errors),
    "calibrate": ("8q-4kv", catch_calibration_error),
}
