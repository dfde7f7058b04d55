"""Latent section: decode steps of an MLA layer, and attention to stored latents alone.

A step stores a token's latent and attends to all: everything between the layer's projections of the
hidden states. Rows that end in " kernel" are attention to latents by absorbed queries.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import Cache, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from hf_fp8kv.attention import latent
from hf_fp8kv.attention.fp8_paged import fp8_paged_attention
from hf_fp8kv.attention.latent import Projections
from hf_fp8kv.cache.cache import FP8PagedCache
from hf_fp8kv.cache.paged_tensor import PagedKV, pages_of

from ..latent import make_module
from . import decode, latent_kernels
from .cached import count_launches
from .goals import ABSORBED, LATENT, STOCK
from .pools import check, check_dense, poison_memory
from .record import Record
from .shapes import BF16, Case, Heads, Kind, Sizes
from .timing import Stage, Step

Pair = tuple[torch.Tensor, torch.Tensor]


def measure(record: Record, sizes: Sizes, backend: str) -> None:
    """Add rows for each case: steps of our cache, of torch and as a model has them; kernels."""
    flash_mla = latent_kernels.find(record, "flash_mla", "flash_mla")
    first, rest = sizes.latents[: sizes.compared], sizes.latents[sizes.compared :]
    for cases in (first, rest):
        # Steps are what goals are about; kernels alone may have to be compiled.
        for case in cases:
            for kind in sizes.layer_kinds:
                _measure_paged(record, case, kind, backend)
            _measure_absorbed(record, case)
            _measure_stock(record, case)
        for case in cases:
            if flash_mla is not None:
                latent_kernels.measure_flash_mla(record, flash_mla, case)
            for kind in sizes.layer_kinds:
                name = f"{kind.name} kernel"
                decode.measure_pages(record, sizes, backend, LATENT, case, kind, name)


@dataclass
class Layers:
    """Layers of a random model, and what each step of any of them is given.

    Attributes:
        modules: the attention of each layer, with weights of its own.
        query: `[B, H, 1, N + P]`.
        new: a token's latent and position, `[B, 1, 1, R]` and `[B, 1, 1, P]`.
        case: with the scaling of the modules.
    """

    modules: list[Any]
    query: torch.Tensor
    new: Pair
    case: Case

    def error(self, output: Any, key: Any, value: Any) -> float:
        """Return the error of the last layer's `output`, `[B, 1, H, V]`, for what it attended to.

        `key` and `value`: dense latents and positions, or handles of stored ones.
        """
        # In float32: queries and results are as exact as the reference.
        exact = _projections(self.modules[-1], torch.float32)
        query = exact.absorb(self.query.float())
        if isinstance(key, PagedKV):
            return check(output, query, pages_of(key), self.case, exact.value)
        return check_dense(output.transpose(1, 2), query, key, value, self.case, exact.value)


def make_layers(stage: Stage, case: Case, layers: int) -> Layers:
    """Return so many layers of DeepSeek's attention for the heads of a case."""
    heads, batch = case.heads, len(case.lengths)
    with stage.device:
        modules = [
            make_module(heads.query, heads.dim, heads.positions, layers, layer)
            for layer in range(layers)
        ]
    query = stage.randn(batch, 1, heads.query, modules[0].qk_head_dim).transpose(1, 2)
    case = replace(case, scaling=modules[0].scaling)
    return Layers(modules, query, _make_tokens(stage, case, 1), case)


def _make_tokens(stage: Stage, case: Case, tokens: int) -> Pair:
    """Return random latents and positions, `[B, 1, tokens, R]` and `[B, 1, tokens, P]`."""
    heads, batch = case.heads, len(case.lengths)
    return stage.randn(batch, 1, tokens, heads.dim), stage.randn(batch, 1, tokens, heads.positions)


def _projections(module: Any, dtype: torch.dtype) -> Projections:
    weight = module.kv_b_proj.weight.to(dtype)
    return Projections(weight, module.qk_nope_head_dim, module.v_head_dim)


def _weight_bytes(heads: Heads) -> int:
    """Return the bytes of the weights that a step multiplies by, 128 + 128 rows for each head."""
    return 2 * heads.query * 256 * heads.dim


def _measure_paged(record: Record, case: Case, kind: Kind, backend: str) -> None:
    stage = record.stage
    moved = case.moved(kind) + _weight_bytes(case.heads)
    count = stage.copies(int(moved))

    def work() -> dict[str, Any]:
        layers = make_layers(stage, case, count)
        cache = FP8PagedCache(layers.modules[0].config, dtype=kind.format, backend=backend)
        steps, handles = fill(stage, layers, cache, fp8_paged_attention)
        with poison_memory():
            for step in steps:
                output = step()
        if not latent.passes_latents(layers.modules[-1], *handles):
            raise RuntimeError("expected attention to stored latents, got expanded ones")
        error, timed = layers.error(output, *handles), stage.time(steps)
        launches = count_launches(stage, steps[-1])
        more = {"moved": moved, "launches": launches, **case.describe(), "layers": count}
        return {"timed": timed, "error": error, **more}

    record.measure(LATENT, case, kind.name, work, size=_size(case, moved, count))


def _measure_stock(record: Record, case: Case) -> None:
    """Add a row for transformers' own cache, whose history the model expands at each step."""
    stage, tokens = record.stage, case.read
    # Of K and V: what the projection gives, and what the model makes of it.
    expanded = 2 * tokens * case.heads.query * (256 + 128 + case.heads.positions)
    moved = case.moved(BF16) + _weight_bytes(case.heads)
    count = stage.copies(expanded)

    def work() -> dict[str, Any]:
        layers, cache = make_layers(stage, case, count), DynamicCache()
        steps, handles = fill(stage, layers, cache, sdpa_attention_forward)
        for step in steps:
            output = step()
        error, batch = layers.error(output, *handles), len(case.lengths)
        more = {"error": error, "moved": moved, "batch": batch, "read": tokens, "layers": count}
        return {"timed": stage.time(steps), **more}

    # torch's attention may make copies of both.
    record.measure(LATENT, case, STOCK, work, size=_size(case, moved, count) + 3.0 * expanded)


def fill(
    stage: Stage, layers: Layers, cache: Cache, attend: Callable[..., Any]
) -> tuple[list[Step], list[Any]]:
    """Fill a cache; return a step of each layer, and a list of what the last one attended to."""
    seen: list[Any] = []

    def step(module: Any) -> torch.Tensor:
        seen[:] = cache.update(*layers.new, module.layer_idx)
        states = module.expand_kv(*seen)
        attended = attend(module, layers.query, *states, None, scaling=module.scaling)
        return attended[0]  # type: ignore[no-any-return]

    for module in layers.modules:
        stored = _make_tokens(stage, layers.case, layers.case.lengths[0] - 1)
        cache.update(*stored, module.layer_idx)
    return [functools.partial(step, module) for module in layers.modules], seen


def _measure_absorbed(record: Record, case: Case) -> None:
    """Add a row for the same algebra in torch, on latents of 16 bits that lie where they are."""
    stage = record.stage
    moved = case.moved(BF16) + _weight_bytes(case.heads)
    count = stage.copies(int(moved))

    def work() -> dict[str, Any]:
        layers = make_layers(stage, case, count)
        stores = [
            torch.cat(_make_tokens(stage, case, case.lengths[0]), -1)[:, 0] for _ in range(count)
        ]
        new = torch.cat(layers.new, -1)[:, 0]
        steps = [
            functools.partial(_absorb, module, layers.query, new, store)
            for module, store in zip(layers.modules, stores, strict=True)
        ]
        output = steps[-1]()
        stored = stores[-1][:, None].split([case.heads.dim, case.heads.positions], -1)
        more = {"error": layers.error(output, *stored), **case.describe(), "layers": count}
        return {"timed": stage.time(steps), "moved": moved, **more}

    record.measure(LATENT, case, ABSORBED, work, size=_size(case, moved, count))


def _absorb(
    module: Any, query: torch.Tensor, new: torch.Tensor, store: torch.Tensor
) -> torch.Tensor:
    """Store `new` in the last place of `store`, `[B, N, R + P]`, and attend to all."""
    store[:, -1:] = new
    projections = _projections(module, store.dtype)
    absorbed = projections.absorb(query * module.scaling)[:, :, 0]
    weights = torch.bmm(absorbed, store.transpose(1, 2)).softmax(-1)
    return projections.expand(torch.bmm(weights, store[..., : module.kv_lora_rank])[:, None])


def _size(case: Case, moved: float, layers: int) -> float:
    """Return the bytes that layers take: their tokens, some in 16 bits too, and logits."""
    logits = 8.0 * case.read * case.heads.query
    return layers * moved * 1.3 + 4 * case.moved(BF16) + logits + 2**32
