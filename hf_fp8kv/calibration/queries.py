"""Sample the queries of a text, and compute the cost of rounding errors for their attention."""

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..attention.switching import watched_attention
from ..ops.visibility import find_first_visible
from .observe import observe

# Maximum number of tokens whose queries are sampled from a text.
_MAX_QUERIES = 64


@dataclass(frozen=True)
class Queries:
    """A sample of queries. Softcaps, sinks, chunks and biases of the logits are not included."""

    q: Tensor  # [Hkv, G * Q, Dk], float32, scaled, of the G query heads of a KV head
    weights: Tensor  # [Hkv, G * Q, N], float32, the attention weights of the tokens

    @classmethod
    def from_states(
        cls, q: Tensor, k: Tensor, positions: Tensor, scaling: float, window: int | None
    ) -> "Queries | None":
        """Return queries with their attention weights, or None if `q` does not fit the keys.

        MLA expands the cached latents, so its queries do not fit. `q` is `[Hq, Q, Dk]` and `k` is
        `[N, Hkv, Dk]`. `positions`, `[Q]`, are the indices of the queries among the keys. A query
        attends to `window` tokens, the last of which is its own. None means all previous tokens.
        """
        num_kv_heads, dim = k.shape[1:]
        if q.shape[0] % num_kv_heads or q.shape[2] != dim:
            return None
        q = q.float() * scaling
        key_positions = torch.arange(len(k), device=k.device)
        is_masked = key_positions > positions[:, None]
        if window is not None:
            is_masked |= key_positions < find_first_visible(positions[:, None], window)
        q = q.reshape(num_kv_heads, -1, dim)
        logits = (q @ k.float().permute(1, 2, 0)).view(num_kv_heads, -1, *is_masked.shape)
        return cls(q, logits.masked_fill(is_masked, -torch.inf).softmax(-1).flatten(1, 2))

    def compute_cost(self, side: str, error: Tensor, v: Tensor | None = None) -> Tensor:
        """Return the cost of `error`, the error of K or V `[N, Hkv, D]`, for each KV head, `[Hkv]`.

        The cost of V is the squared error of the output. The cost of K is the variance of the
        logits' errors, or with `v`, `[N, Hkv, D]`, the squared error of the output to first order.
        """
        error = error.transpose(0, 1)
        if side == "v":
            return (self.weights @ error).square().sum((-2, -1))
        logit_errors = self.q @ error.mT
        logit_errors = logit_errors - (self.weights * logit_errors).sum(-1, keepdim=True)
        if v is not None:
            return (self.weights * logit_errors @ v.transpose(0, 1)).square().sum((-2, -1))
        return (self.weights * logit_errors.square()).sum((-2, -1))


# K and V of a layer, `[N, Hkv, D]`, in one window at one position, and a sample of its queries.
LayerStates = tuple[Tensor, Tensor, Queries | None]


def observe_queries(
    model: PreTrainedModel,
    window: Tensor,
    layer_indices: frozenset[int],
    first_position: int | None = None,
) -> dict[int, LayerStates]:
    """Run the model on a window, and return the states of each layer. Errors are as in `observe`.

    Queries are visible if the model uses transformers' attention registry and attends to this K.
    """
    states: dict[int, tuple[Tensor, Tensor]] = {}
    layer_states: dict[int, LayerStates] = {}

    def on_states(index: int, k: Tensor, v: Tensor) -> None:
        states[index] = (k, v)

    def on_attention(
        module: Any, query: Tensor, _key: Tensor, _value: Tensor, options: dict[str, Any]
    ) -> None:
        if module.layer_idx in states:
            k, v = states.pop(module.layer_idx)
            layer_states[module.layer_idx] = (k, v, _sample_queries(query, k, options))

    hides_queries = model.config.is_encoder_decoder or not model._can_set_attn_implementation()
    with nullcontext() if hides_queries else watched_attention(model, on_attention):
        observe(model, [window], layer_indices, on_states, first_position)
    return layer_states | {index: (k, v, None) for index, (k, v) in states.items()}


def _sample_queries(query: Tensor, k: Tensor, options: dict[str, Any]) -> Queries | None:
    """Sample evenly spaced queries from the last three quarters of `query`, `[1, Hq, N, D]`."""
    num_tokens = query.shape[2]
    if num_tokens != len(k):
        return None
    num_queries = min(_MAX_QUERIES, num_tokens)
    positions = torch.linspace(num_tokens // 4, num_tokens - 1, num_queries, device="cpu").long()
    scaling = options.get("scaling")
    window = options.get("sliding_window")
    return Queries.from_states(
        query[0, :, positions.to(query.device)].to(k.device),
        k,
        positions.to(k.device),
        query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        None if window is None else int(window),
    )
