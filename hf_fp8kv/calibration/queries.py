"""Queries of a text, and the cost of errors of stored K and V in their attention."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from ..attention.switching import watched_attention
from ..ops.visibility import first_visible
from ..scales.layer_scales import Granularity
from .observe import Batch, observe

# Queries of a window.
_QUERIES = 64


@dataclass(frozen=True)
class Queries:
    """Some queries of texts; softcaps, sinks, chunks and biases of the logits are left out."""

    q: torch.Tensor  # [..., Hkv, Q, Dk], float32, scaled: of all query heads of a KV head
    weights: torch.Tensor  # [..., Hkv, Q, N], float32: how much each gives to every token

    @classmethod
    def from_states(
        cls, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, scaling: float,
        window: int | None,
    ) -> "Queries | None":  # fmt: skip
        """Return the queries; None where they are not of these keys (MLA expands what is cached).

        `q` is `[Hq, Q, Dk]`, `k` `[N, Hkv, Dk]`, and `positions` `[Q]` those of the queries among
        the keys. A query sees `window` tokens up to its own; None: all.
        """
        heads, dim = k.shape[1:]
        if q.shape[0] % heads or q.shape[2] != dim:
            return None
        q, tokens = q.float() * scaling, torch.arange(len(k), device=k.device)
        hidden = tokens > positions[:, None]
        if window is not None:
            hidden |= tokens < first_visible(positions[:, None], window)
        q = q.reshape(heads, -1, dim)
        logits = (q @ k.float().permute(1, 2, 0)).view(heads, -1, *hidden.shape)
        return cls(q, logits.masked_fill(hidden, -torch.inf).softmax(-1).flatten(1, 2))

    def weigh_keys(self) -> torch.Tensor:
        """Return what the square of an error of each number of K costs: `[N, Hkv, Dk]`.

        That is the expectation, for errors that do not depend on each other.
        """
        spread = self.weights * (1 - self.weights)
        return torch.einsum("hqn,hqd->nhd", spread, self.q.square())

    def cost(self, side: str, error: torch.Tensor, granularity: Granularity) -> torch.Tensor:
        """Return the cost of errors of K or V, `[..., N, Hkv, D]`: `[..., Hkv, D or 1]`.

        Only "channel" has a cost for each channel. Many errors take as few operations as one.
        """
        error = error.transpose(-3, -2)
        if side == "v":
            moved = (self.weights @ error).square().sum(-2)
            return moved if granularity == "channel" else moved.sum(-1, keepdim=True)
        if granularity == "channel":
            mean, square = self.weights @ error, self.weights @ error.square()
            return (self.q.square() * (square - mean.square())).sum(-2)
        moved = self.q @ error.mT
        moved = moved - (self.weights * moved).sum(-1, keepdim=True)
        return (self.weights * moved.square()).sum((-2, -1))[..., None]


def observe_queries(
    model: PreTrainedModel, batch: Batch, layers: frozenset[int], on_layer: Callable[..., None]
) -> None:
    """Call the model, and `on_layer` with a layer's index, K, V and its queries or None.

    Queries are seen if the model looks its attention up and attends to the K of the text.
    """
    states: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def on_states(index: int, k: torch.Tensor, v: torch.Tensor) -> None:
        states[index] = (k, v)

    def on_attention(
        module: Any, query: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: dict[str, Any]
    ) -> None:
        if module.layer_idx in states:
            k, v = states.pop(module.layer_idx)
            on_layer(module.layer_idx, k, v, _sample_queries(query, k, call))

    hidden = model.config.is_encoder_decoder or not model._can_set_attn_implementation()
    with nullcontext() if hidden else watched_attention(model, on_attention):
        observe(model, batch, layers, on_states)
    for index in sorted(states):  # layers without visible queries
        on_layer(index, *states[index], None)


def _sample_queries(query: torch.Tensor, k: torch.Tensor, call: dict[str, Any]) -> Queries | None:
    """Return queries from all over the last three quarters of one window, `[1, Hq, N, D]`."""
    tokens = query.shape[2]
    if query.shape[0] != 1 or tokens != len(k):
        return None
    positions = torch.linspace(tokens // 4, tokens - 1, min(_QUERIES, tokens), device="cpu").long()
    scaling = call.get("scaling")
    window = call.get("sliding_window")
    return Queries.from_states(
        query[0, :, positions.to(query.device)].to(k.device), k, positions.to(k.device),
        query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        None if window is None else int(window),
    )  # fmt: skip
