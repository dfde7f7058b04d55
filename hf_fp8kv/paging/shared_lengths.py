"""Lengths of preallocated layers: one tensor for all of them, which a step advances once."""

import torch

from .. import ops
from .page_pool import zeros


class SharedLengths:
    """How many tokens each preallocated layer of a cache holds.

    The layers of a model get the same tokens, one after the other. So there is one length: the
    first layer of a step advances it, and the others of that step take it as it is. A layer that
    is called in another way (not in every step, twice in a step, with other tokens) has a length
    of its own from then on, until `set`.

    What is kept in Python is the same before each step, and a length is a tensor, so that compiled
    code stays valid.

    Attributes:
        layers: how many layers there are; they are known by their numbers.
        shared: `[B]`, int32, the common length, for each device that a layer is on.
        own: `[B]`, int32, of each layer that was called; counts for those in `apart`.
        apart: layers with a length of their own.
        late: layers that have yet to get the last `tokens` of the common length.
        tokens: of the last step.
    """

    def __init__(self) -> None:
        self.layers = self.tokens = 0
        self.shared: dict[torch.device, torch.Tensor] = {}
        self.own: dict[int, torch.Tensor] = {}
        self.apart: list[int] = []
        self.late: list[int] = []

    def add(self) -> int:
        """Add a layer, and return its number."""
        self.layers += 1
        return self.layers - 1

    def place(self, layer: int, batch: int, device: torch.device) -> None:
        """Have the lengths of a layer on `device`, where its keys are, at addresses that stay."""
        if device not in self.shared:
            first = next(iter(self.shared.values()), None)
            self.shared[device] = zeros((batch,), torch.int32, device)
            if first is not None:
                self.shared[device].copy_(first)
        own = zeros((batch,), torch.int32, device)
        if layer in self.own:
            own.copy_(self.own[layer])
        self.own[layer] = own

    def move(self, layer: int, device: torch.device) -> None:
        """Do what `place` does, and forget a device without layers."""
        self.place(layer, len(self.own[layer]), device)
        used = {own.device for own in self.own.values()}
        self.shared = {device: x for device, x in self.shared.items() if device in used}

    def tensors(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what a step of a layer may write: the common length, and the layer's own."""
        own = self.own[layer]
        return self.shared[own.device], own

    def of(self, layer: int) -> torch.Tensor:
        """Return the length of a layer, `[B]`, int32; not to be written into."""
        shared, own = self.tensors(layer)
        if layer in self.apart:
            return own
        return shared - self.tokens if layer in self.late else shared

    def after(self, layer: int, tokens: int, limit: int, backend: str) -> torch.Tensor:
        """Return what `of` will after `advance`: `[B]`, int32; see `ops.advance`."""
        if layer in self.late and tokens == self.tokens:
            return self.tensors(layer)[0]
        return ops.advance(self.of(layer), tokens, limit, backend)

    def advance(self, layer: int, tokens: int, lengths: torch.Tensor) -> None:
        """Note that a layer has stored `tokens`; `lengths` is what `after` returned for them."""
        if layer in self.late and tokens == self.tokens:
            self.late.remove(layer)
            return
        if layer in self.late or layer in self.apart:
            self.part(layer)
            self.own[layer].copy_(lengths)
            return
        for other in list(self.late):
            self.part(other)
        for device, shared in self.shared.items():
            if device == lengths.device:
                shared.copy_(lengths)
            else:
                shared.add_(tokens)
        self.late = [x for x in range(self.layers) if x != layer and x not in self.apart]
        self.tokens = tokens

    def part(self, layer: int) -> None:
        """Give a layer a length of its own."""
        if layer in self.apart:
            return
        # A layer that was never called has no tensor, and no tokens.
        if layer in self.own:
            self.own[layer].copy_(self.of(layer))
        self.apart.append(layer)
        if layer in self.late:
            self.late.remove(layer)

    def set(self, lengths: list[int]) -> None:
        """Set the length of every layer; those with the most tokens share theirs."""
        most = max(lengths, default=0)
        for shared in self.shared.values():
            shared.fill_(most)
        self.apart = [layer for layer, length in enumerate(lengths) if length != most]
        self.late = []
        for layer in self.apart:
            if layer in self.own:
                self.own[layer].fill_(lengths[layer])

    def set_one(self, layer: int, length: int) -> None:
        """Set the length of one layer, which becomes its own."""
        self.part(layer)
        if layer in self.own:
            self.own[layer].fill_(length)

    def on_host(self) -> list[int]:
        """Return the length of every layer as a number; waits for the device."""
        common = next((int(shared[0]) for shared in self.shared.values()), 0)
        lengths = [common - self.tokens * (layer in self.late) for layer in range(self.layers)]
        for layer in self.apart:
            lengths[layer] = int(self.own[layer][0]) if layer in self.own else 0
        return lengths

    def resize(self, batch: int) -> None:
        """Follow a change of the number of sequences, which are all of one length."""
        self.shared = {device: _resize(x, batch) for device, x in self.shared.items()}
        self.own = {layer: _resize(x, batch) for layer, x in self.own.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of all lengths."""
        return sum(x.nbytes for x in (*self.shared.values(), *self.own.values()))


def _resize(lengths: torch.Tensor, batch: int) -> torch.Tensor:
    if len(lengths) == batch:
        return lengths
    return zeros((batch,), torch.int32, lengths.device).copy_(lengths[:1])
