"""Measure decode steps of an MLA layer, and attention to stored latents alone.

A step stores the latent of a token and attends to all latents. It includes everything between the
projections of the hidden states. Rows whose name ends in " kernel" time attention to latents alone.

Shapes: batch B, tokens N, query heads H of size D. Latents have R values, their RoPE parts P
values, and heads of the output V values.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from transformers import Cache, DeepseekV3Config, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

from hf_fp8kv.attention import latent
from hf_fp8kv.attention.fp8_paged import fp8_paged_attention
from hf_fp8kv.attention.latent import Projections
from hf_fp8kv.cache.cache import FP8PagedCache
from hf_fp8kv.cache.paged_tensor import PagedKV, get_pages
from hf_fp8kv.modeling.model_support import ATTENTION

from .attention import measure_pages
from .random_data import compute_dense_error, compute_output_error, poison_memory
from .record import Record
from .shapes import BF16, Case, PageFormat, RunSizes
from .stage import Stage, Step

SECTION = "latent"
STOCK, ABSORBED = "DynamicCache", "absorbed in torch"
# Latents and RoPE parts of tokens, `[B, 1, T, R]` and `[B, 1, T, P]`.
Latents = tuple[torch.Tensor, torch.Tensor]


def measure(record: Record, sizes: RunSizes, backend: str) -> None:
    """Add rows for steps with FP8PagedCache, in torch and with DynamicCache, and for kernels."""
    for case in sizes.latent_cases:
        for fmt in sizes.layer_formats:
            _measure_paged(record, case, fmt, backend)
        if not record.stage.is_compiling:
            _measure_absorbed(record, case)
            _measure_stock(record, case)
        for fmt in sizes.layer_formats:
            measure_pages(record, sizes, backend, SECTION, case, fmt, f"{fmt.name} kernel")


def make_module(num_heads: int, rank: int, rope_dim: int, num_layers: int, index: int) -> Any:
    """Return a random attention layer of DeepSeek V3, bfloat16, that stores latents.

    `rank` and `rope_dim` are the sizes of a latent and of its RoPE part. `index` is the index of
    the layer in a model of `num_layers` layers.
    """
    config = DeepseekV3Config(
        hidden_size=256, num_attention_heads=num_heads, num_key_value_heads=num_heads,
        kv_lora_rank=rank, qk_rope_head_dim=rope_dim, q_lora_rank=64, num_hidden_layers=num_layers,
        attn_implementation=ATTENTION,
    )  # fmt: skip
    module = DeepseekV3Attention(config, index).to(torch.bfloat16).eval().requires_grad_(False)
    torch.nn.init.normal_(module.kv_b_proj.weight, std=rank**-0.5)
    latent.install(module)
    return module


class LatentLayers:
    """Attention layers of a random DeepSeek model, and the input of each step.

    Attributes:
        modules: The attention module of each layer.
        query: Query of a token, `[B, H, 1, D]`, before absorption.
        new_latents: Latent and RoPE part of the new token.
        case: The case, with the scaling of the modules.
    """

    def __init__(self, stage: Stage, case: Case, num_layers: int) -> None:
        self.stage = stage
        heads = case.heads
        with stage.device:
            self.modules: list[Any] = [
                make_module(heads.num_query_heads, heads.dim, heads.rope_dim, num_layers, index)
                for index in range(num_layers)
            ]
        dim = self.modules[0].qk_head_dim
        self.query = stage.randn(len(case.lengths), 1, heads.num_query_heads, dim).transpose(1, 2)
        self.case = replace(case, scaling=self.modules[0].scaling)
        self.new_latents = self.draw_latents(1)

    def draw_latents(self, num_tokens: int) -> Latents:
        heads = self.case.heads
        shape = (len(self.case.lengths), 1, num_tokens)
        return self.stage.randn(*shape, heads.dim), self.stage.randn(*shape, heads.rope_dim)

    def fill(self, cache: Cache, attend: Callable[..., Any]) -> tuple[list[Step], list[Any]]:
        """Fill a cache. Return a step of each layer, and a list that each step changes.

        The list has the latents and RoPE parts that `cache.update` returned last. A paged cache
        returns handles of its pages.
        """
        stored: list[Any] = []

        def step(module: Any) -> torch.Tensor:
            stored[:] = cache.update(*self.new_latents, module.layer_idx)
            states = module.expand_kv(*stored)
            return attend(module, self.query, *states, None, scaling=module.scaling)[0]

        for module in self.modules:
            cache.update(*self.draw_latents(self.case.lengths[0] - 1), module.layer_idx)
        return [functools.partial(step, module) for module in self.modules], stored

    def measure_error(self, output: torch.Tensor, latents: Any, rope_parts: Any) -> float:
        """Return the relative error of the last layer's output, `[B, 1, H, V]`.

        `latents` and `rope_parts` are dense, or handles of a paged cache.
        """
        # Projections in float32 add no error to the comparison with the reference.
        projections = _make_projections(self.modules[-1], torch.float32)
        query = projections.absorb(self.query.float())
        if isinstance(latents, PagedKV):
            return compute_output_error(
                output, query, get_pages(latents), self.case, projections.value
            )
        return compute_dense_error(
            output.transpose(1, 2), query, latents, rope_parts, self.case, projections.value
        )


def _make_projections(module: Any, dtype: torch.dtype) -> Projections:
    return Projections(
        module.kv_b_proj.weight.to(dtype), module.qk_nope_head_dim, module.v_head_dim
    )


def _measure_step(
    record: Record, case: Case, name: str, fmt: PageFormat,
    measure_steps: Callable[[LatentLayers], dict[str, Any]], buffer_bytes: int = 0,
) -> None:  # fmt: skip
    """Add a row for a step that uses `buffer_bytes` bytes, by default the bytes that it reads."""
    # A step reads the stored tokens, and 128 + 128 rows of weights for each head.
    bytes_read = case.count_bytes_read(fmt) + 2 * case.heads.num_query_heads * 256 * case.heads.dim
    num_layers = record.stage.count_buffers(buffer_bytes or int(bytes_read))

    def measure_row() -> dict[str, Any]:
        layers = LatentLayers(record.stage, case, num_layers)
        return {
            "moved": bytes_read, **case.describe(), "layers": num_layers, **measure_steps(layers),
        }  # fmt: skip

    record.measure(SECTION, case, name, measure_row)


def _measure_paged(record: Record, case: Case, fmt: PageFormat, backend: str) -> None:
    def measure_steps(layers: LatentLayers) -> dict[str, Any]:
        cache = FP8PagedCache(layers.modules[0].config, dtype=fmt.dtype, backend=backend)
        steps, stored = layers.fill(cache, fp8_paged_attention)
        with poison_memory():
            for step in steps:
                output = step()
        if not latent.reads_stored_latents(layers.modules[-1]):
            raise RuntimeError("expected attention to stored latents, got expanded K and V")
        return {
            "error": layers.measure_error(output, *stored), **record.stage.time_steps(steps),
            "launches": record.stage.count_launches(steps),
        }  # fmt: skip

    _measure_step(record, case, fmt.name, fmt, measure_steps)


def _measure_stock(record: Record, case: Case) -> None:
    """Add a row for transformers' cache, whose latents the model expands in each step."""

    def measure_steps(layers: LatentLayers) -> dict[str, Any]:
        steps, stored = layers.fill(DynamicCache(), sdpa_attention_forward)
        for step in steps:
            output = step()
        # `case.describe()` counts operations of the absorbed form, which this step does not use.
        return {
            "error": layers.measure_error(output, *stored), **record.stage.time_steps(steps),
            "flops": None,
        }  # fmt: skip

    # For each token and head, the projection writes 256 values of K and V. Then the 128 values of K
    # are copied next to the RoPE part.
    expanded_bytes = (
        2 * case.tokens_read * case.heads.num_query_heads * (256 + 128 + case.heads.rope_dim)
    )
    _measure_step(record, case, STOCK, BF16, measure_steps, expanded_bytes)


def _measure_absorbed(record: Record, case: Case) -> None:
    """Add a row for the absorbed form in torch, on 16-bit latents in a preallocated buffer."""

    def measure_steps(layers: LatentLayers) -> dict[str, Any]:
        buffers = [
            torch.cat(layers.draw_latents(case.lengths[0]), -1)[:, 0] for _ in layers.modules
        ]
        new_latents = torch.cat(layers.new_latents, -1)[:, 0]
        steps = [
            functools.partial(attend_absorbed, module, layers.query, new_latents, buffer)
            for module, buffer in zip(layers.modules, buffers, strict=True)
        ]
        output = steps[-1]()
        stored = buffers[-1][:, None].split([case.heads.dim, case.heads.rope_dim], -1)
        return {"error": layers.measure_error(output, *stored), **record.stage.time_steps(steps)}

    _measure_step(record, case, ABSORBED, BF16, measure_steps)


def attend_absorbed(
    module: Any, query: torch.Tensor, new_latents: torch.Tensor, buffer: torch.Tensor
) -> torch.Tensor:
    """Store latents in the last slot of `buffer`, `[B, N, R + P]`, and attend to all latents."""
    buffer[:, -1:] = new_latents
    projections = _make_projections(module, buffer.dtype)
    absorbed_query = projections.absorb(query * module.scaling)[:, :, 0]
    weights = torch.bmm(absorbed_query, buffer.transpose(1, 2)).softmax(-1)
    return projections.expand(torch.bmm(weights, buffer[..., : module.kv_lora_rank])[:, None])
