"""Step: the facts of a call that all layers of a group share."""

import torch

from .. import ops


class Step:
    """A call of the layers of a group, each of which gets the same number of tokens.

    The first layer of a step makes it. Lengths and plans are made once per device and kind.

    Attributes:
        start: tokens that each sequence held before.
        stop: tokens that each sequence holds after it.
        batch: the number of sequences.
        version: the version of the block table, once it has the pages of the call.
        kept: the logical page from which on a long call has pages; None: it is not long.
    """

    def __init__(
        self, start: int, stop: int, batch: int, version: int = -1, kept: int | None = None
    ) -> None:
        self.start, self.stop, self.batch, self.version = start, stop, batch, version
        self.kept = kept
        self._lengths: dict[torch.device, torch.Tensor] = {}
        self._plans: dict[tuple[object, ...], torch.Tensor | None] = {}

    def lengths(self, device: torch.device) -> torch.Tensor:
        """Return `stop` for each sequence, `[B]`, int32, on `device`."""
        if (lengths := self._lengths.get(device)) is None:
            lengths = torch.full((self.batch,), self.stop, dtype=torch.int32, device=device)
            self._lengths[device] = lengths
        return lengths

    def plan(
        self, first: int, heads: int, rows: int, device: torch.device, backend: str
    ) -> torch.Tensor | None:
        """Return the plan for positions `first` to `stop - 1`; None: the backend has no plans.

        `heads`: KV heads. `rows`: query rows of each. A plan never changes. It holds for any number
        of query tokens, and for any window that leaves nothing before `first` visible.
        """
        key = (first, heads, rows, device, backend)
        if key not in self._plans:
            size = ops.plan_rows(backend, device, self.batch, heads, self.stop - first, rows)
            plan = None
            if size is not None:
                plan = torch.empty((size, 4), dtype=torch.int32, device=device)
                ops.make_plan(plan, self.lengths(device), 1, 0, first, heads, backend)
            self._plans[key] = plan
        return self._plans[key]
