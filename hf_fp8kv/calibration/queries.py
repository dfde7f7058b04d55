"""What errors of stored K and V do to attention, as seen by some queries."""

from dataclasses import dataclass

import torch

from ..formats.rotation import rotate
from ..ops.visibility import first_visible
from ..scales.layer_scales import Granularity


@dataclass(frozen=True)
class Queries:
    """Some queries of a text; softcaps, sinks, chunks and biases of the logits are left out."""

    q: torch.Tensor  # [Hkv, G, Q, Dk], float32, scaled: G query heads for each KV head
    weights: torch.Tensor  # [Hkv, G, Q, N], float32: how much each gives to every token

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
        q = q.float().reshape(heads, -1, *q.shape[1:]) * scaling
        logits = torch.einsum("hgqd,nhd->hgqn", q, k.float())
        tokens = torch.arange(len(k), device=k.device)
        hidden = tokens > positions[:, None]
        if window is not None:
            hidden |= tokens < first_visible(positions[:, None], window)
        return cls(q, logits.masked_fill(hidden, -torch.inf).softmax(-1))

    def rotate(self) -> "Queries":
        """Return the queries of rotated keys, whose products with them are the same."""
        return Queries(rotate(self.q), self.weights)

    def weigh_keys(self) -> torch.Tensor:
        """Return what the square of an error of each number of K costs: `[N, Hkv, Dk]`.

        That is the expectation, for errors that do not depend on each other.
        """
        spread = self.weights * (1 - self.weights)
        return torch.einsum("hgqn,hgqd->nhd", spread, self.q.square())

    def cost_of_keys(self, error: torch.Tensor, granularity: Granularity) -> torch.Tensor:
        """Return the cost of errors of K, `[N, Hkv, Dk]`: `[Hkv, 1]`, by channel `[Hkv, Dk]`."""
        if granularity == "channel":
            mean = torch.einsum("hgqn,nhd->hgqd", self.weights, error)
            square = torch.einsum("hgqn,nhd->hgqd", self.weights, error.square())
            return (self.q.square() * (square - mean.square())).sum((-3, -2))
        moved = torch.einsum("hgqd,nhd->hgqn", self.q, error)
        mean = (self.weights * moved).sum(-1, keepdim=True)
        return (self.weights * (moved - mean).square()).sum((-3, -2, -1))[..., None]

    def cost_of_values(self, error: torch.Tensor, granularity: Granularity) -> torch.Tensor:
        """Return the cost of errors of V, `[N, Hkv, Dv]`, in the same shapes."""
        moved = torch.einsum("hgqn,nhd->hgqd", self.weights, error).square().sum((-3, -2))
        return moved if granularity == "channel" else moved.sum(-1, keepdim=True)
