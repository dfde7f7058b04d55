"""Measure decode steps of an MLA layer, and attention to stored latents alone.

A step stores the latent of a token and attends to all latents. It contains everything between the
projections of the hidden states. Rows named " kernel" at the end time attention to latents alone.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
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
from .attention import measure_pages
from .goals import ABSORBED, LATENT, STOCK
from .pools import check, check_dense, poison_memory
from .record import Record
from .shapes import BF16, Case, Kind, Sizes
from .stage import Stage, Step

Pair = tuple[torch.Tensor, torch.Tensor]


def measure(record: Record, sizes: Sizes, backend: str) -> None:
    """Add rows for steps of this package's cache, of torch and of a model, and for kernels."""
    first, remaining = sizes.latents[: sizes.compared], sizes.latents[sizes.compared :]
    for cases in (first, remaining):
        # Steps come first, because goals are about steps and kernels may need compilation.
        for case in cases:
            for kind in sizes.layer_kinds:
                _measure_paged(record, case, kind, backend)
            if not record.stage.compiling:
                _measure_absorbed(record, case)
                _measure_stock(record, case)
        for case in cases:
            for kind in sizes.layer_kinds:
                name = f"{kind.name} kernel"
                measure_pages(record, sizes, backend, LATENT, case, kind, name)


class Layers:
    """Attention layers of a random DeepSeek model, and the input of each step.

    Attributes:
        modules: The attention of each layer.
        query: `[B, H, 1, N + P]`.
        new: Latent and RoPE part of a token, `[B, 1, 1, R]` and `[B, 1, 1, P]`.
        case: The case, with the scaling of the modules.
    """

    def __init__(self, stage: Stage, case: Case, layers: int) -> None:
        heads, self.stage = case.heads, stage
        with stage.device:
            self.modules: list[Any] = [
                make_module(heads.query, heads.dim, heads.positions, layers, layer)
                for layer in range(layers)
            ]
        dim = self.modules[0].qk_head_dim
        self.query = stage.randn(len(case.lengths), 1, heads.query, dim).transpose(1, 2)
        self.case = replace(case, scaling=self.modules[0].scaling)
        self.new = self.random_tokens(1)

    def random_tokens(self, tokens: int) -> Pair:
        """Return random latents and RoPE parts, `[B, 1, tokens, R]` and `[B, 1, tokens, P]`."""
        heads, shape = self.case.heads, (len(self.case.lengths), 1, tokens)
        return self.stage.randn(*shape, heads.dim), self.stage.randn(*shape, heads.positions)

    def fill(self, cache: Cache, attend: Callable[..., Any]) -> tuple[list[Step], list[Any]]:
        """Fill a cache. Return a step of each layer, and a list of the handles of the last step."""
        handles: list[Any] = []

        def step(module: Any) -> torch.Tensor:
            handles[:] = cache.update(*self.new, module.layer_idx)
            states = module.expand_kv(*handles)
            attended = attend(module, self.query, *states, None, scaling=module.scaling)
            return attended[0]  # type: ignore[no-any-return]

        for module in self.modules:
            cache.update(*self.random_tokens(self.case.lengths[0] - 1), module.layer_idx)
        return [functools.partial(step, module) for module in self.modules], handles

    def error(self, output: torch.Tensor, key: Any, value: Any) -> float:
        """Return the error of the last layer's output.

        Args:
            output: `[B, 1, H, V]`.
            key, value: Dense latents and positions, or handles of stored latents.
        """
        # Queries and results in float32 are as exact as the reference.
        exact = _projections(self.modules[-1], torch.float32)
        query = exact.absorb(self.query.float())
        if isinstance(key, PagedKV):
            return check(output, query, pages_of(key), self.case, exact.value)
        return check_dense(output.transpose(1, 2), query, key, value, self.case, exact.value)


def _projections(module: Any, dtype: torch.dtype) -> Projections:
    weight = module.kv_b_proj.weight.to(dtype)
    return Projections(weight, module.qk_nope_head_dim, module.v_head_dim)


def _measure_step(
    record: Record, case: Case, name: str, kind: Kind, work: Callable[[Layers], dict[str, Any]],
    buffer: int = 0,
) -> None:  # fmt: skip
    """Add a row for a step. `buffer` is the bytes that it reads instead of the stored tokens."""
    stage, heads = record.stage, case.heads
    # A step reads the tokens, and multiplies by 128 + 128 rows of weights for each head.
    size = case.bytes_read(kind) + 2 * heads.query * 256 * heads.dim
    layers = stage.copies(buffer or int(size))

    def measured() -> dict[str, Any]:
        fields = {"moved": size, **case.describe(), "layers": layers}
        return {**fields, **work(Layers(stage, case, layers))}

    record.measure(LATENT, case, name, measured)


def _measure_paged(record: Record, case: Case, kind: Kind, backend: str) -> None:
    def work(layers: Layers) -> dict[str, Any]:
        cache = FP8PagedCache(layers.modules[0].config, dtype=kind.format, backend=backend)
        steps, handles = layers.fill(cache, fp8_paged_attention)
        with poison_memory():
            for step in steps:
                output = step()
        if not latent.reads_stored_latents(layers.modules[-1]):
            raise RuntimeError("expected attention to stored latents, got expanded K and V")
        error, timed = layers.error(output, *handles), record.stage.time(steps)
        return {**timed, "error": error, "launches": record.stage.count_launches(steps)}

    _measure_step(record, case, kind.name, kind, work)


def _measure_stock(record: Record, case: Case) -> None:
    """Add a row for transformers' cache, whose latents the model expands in each step."""

    def work(layers: Layers) -> dict[str, Any]:
        steps, handles = layers.fill(DynamicCache(), sdpa_attention_forward)
        for step in steps:
            output = step()
        error = layers.error(output, *handles)
        # The fields count operations of the absorbed form, which this step does not use.
        return {**record.stage.time(steps), "error": error, "flops": None}

    # K and V from the projection, and their copies with positions.
    expanded = 2 * case.read * case.heads.query * (256 + 128 + case.heads.positions)
    _measure_step(record, case, STOCK, BF16, work, expanded)


def _measure_absorbed(record: Record, case: Case) -> None:
    """Add a row for the same algebra in torch, on 16-bit latents that stay in place."""

    def work(layers: Layers) -> dict[str, Any]:
        length = case.lengths[0]
        stores = [torch.cat(layers.random_tokens(length), -1)[:, 0] for _ in layers.modules]
        new = torch.cat(layers.new, -1)[:, 0]
        steps = [
            functools.partial(absorb, module, layers.query, new, store)
            for module, store in zip(layers.modules, stores, strict=True)
        ]
        output = steps[-1]()
        stored = stores[-1][:, None].split([case.heads.dim, case.heads.positions], -1)
        return {"error": layers.error(output, *stored), **record.stage.time(steps)}

    _measure_step(record, case, ABSORBED, BF16, work)


def absorb(module: Any, query: torch.Tensor, new: torch.Tensor, store: torch.Tensor) -> Any:
    """Store `new` in the last slot of `store`, `[B, N, R + P]`, and attend to all tokens."""
    store[:, -1:] = new
    projections = _projections(module, store.dtype)
    absorbed = projections.absorb(query * module.scaling)[:, :, 0]
    weights = torch.bmm(absorbed, store.transpose(1, 2)).softmax(-1)
    return projections.expand(torch.bmm(weights, store[..., : module.kv_lora_rank])[:, None])
