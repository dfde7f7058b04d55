"""Sample the queries of a text, and compute the cost of rounding errors for their attention."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from ..attention.switching import watched_attention
from ..ops.visibility import find_first_visible
from ..scales.layer_scales import Granularity
from .observe import Batch, observe

# Maximum number of queries of a window.
_MAX_QUERIES = 64


@dataclass(frozen=True)
class Queries:
    """A sample of queries. Softcaps, sinks, chunks and biases of the logits are not included."""

    q: torch.Tensor  # [..., Hkv, Q, Dk], float32, scaled, of all query heads of a KV head
    weights: torch.Tensor  # [..., Hkv, Q, N], float32, the attention weights of the tokens

    @classmethod
    def from_states(
        cls, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, scaling: float,
        window: int | None,
    ) -> "Queries | None":  # fmt: skip
        """Return queries with their attention weights, or None if `q` does not fit the keys.

        MLA expands the cached latents, so its queries do not fit. `q` is `[Hq, Q, Dk]` and `k` is
        `[N, Hkv, Dk]`. `positions`, `[Q]`, are the indices of the queries among the keys. A query
        attends to `window` tokens, the last of which is its own. None means all previous tokens.
        """
        num_heads, dim = k.shape[1:]
        if q.shape[0] % num_heads or q.shape[2] != dim:
            return None
        q, key_positions = q.float() * scaling, torch.arange(len(k), device=k.device)
        is_masked = key_positions > positions[:, None]
        if window is not None:
            is_masked |= key_positions < find_first_visible(positions[:, None], window)
        q = q.reshape(num_heads, -1, dim)
        logits = (q @ k.float().permute(1, 2, 0)).view(num_heads, -1, *is_masked.shape)
        return cls(q, logits.masked_fill(is_masked, -torch.inf).softmax(-1).flatten(1, 2))

    def cost(self, side: str, error: torch.Tensor, granularity: Granularity) -> torch.Tensor:
        """Return the cost of errors of K or V, `[..., N, Hkv, D]`, as `[..., Hkv, D or 1]`.

        Only granularity "channel" gives a cost for each channel. The number of operations does not
        depend on the number of errors.
        """
        error = error.transpose(-3, -2)
        if side == "v":
            outputs = (self.weights @ error).square().sum(-2)
            return outputs if granularity == "channel" else outputs.sum(-1, keepdim=True)
        if granularity == "channel":
            mean_error, mean_square = self.weights @ error, self.weights @ error.square()
            return (self.q.square() * (mean_square - mean_error.square())).sum(-2)
        logits = self.q @ error.mT
        logits = logits - (self.weights * logits).sum(-1, keepdim=True)
        return (self.weights * logits.square()).sum((-2, -1))[..., None]


def observe_queries(
    model: PreTrainedModel, batch: Batch, layers: frozenset[int], on_layer: Callable[..., None]
) -> None:
    """Run the model, and call `on_layer` with a layer's index, K, V, and its queries or None.

    Queries are visible if the model uses transformers' attention registry and attends to this K.
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

    is_hidden = model.config.is_encoder_decoder or not model._can_set_attn_implementation()
    with nullcontext() if is_hidden else watched_attention(model, on_attention):
        observe(model, batch, layers, on_states)
    for index in sorted(states):  # layers without visible queries
        on_layer(index, *states[index], None)


def _sample_queries(query: torch.Tensor, k: torch.Tensor, call: dict[str, Any]) -> Queries | None:
    """Return evenly spaced queries of the last three quarters of a window, `[1, Hq, N, D]`."""
    num_tokens = query.shape[2]
    if query.shape[0] != 1 or num_tokens != len(k):
        return None
    num_queries = min(_MAX_QUERIES, num_tokens)
    positions = torch.linspace(num_tokens // 4, num_tokens - 1, num_queries, device="cpu").long()
    scaling, window = call.get("scaling"), call.get("sliding_window")
    return Queries.from_states(
        query[0, :, positions.to(query.device)].to(k.device), k, positions.to(k.device),
        query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        None if window is None else int(window),
    )  # fmt: skip
