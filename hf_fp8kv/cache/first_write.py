"""The first tokens of a layer, which wait for their queries: these decide how it is stored.

`update` is not given queries. So a first call is stored by its attention, if that is "fp8_paged";
what else looks at the pages, or the next layer, stores it without them, in the safe plan.
"""

import threading
import weakref

import torch
from torch import Tensor

from .. import ops
from ..paging.pending_write import PendingWrite
from .choice import choose_plan
from .layer import PagedLayerBase


class FirstWrite(PendingWrite):
    """New tokens of an empty layer, all of them, and where the last of them go."""

    def __init__(
        self,
        layer: PagedLayerBase,
        given: Tensor,
        key: Tensor,
        value: Tensor,
        first: int,
        lengths: Tensor,
        center: Tensor | None,
    ) -> None:
        """Note what is to be stored.

        Args:
            layer: it has pages for the tokens.
            given: what the attention will be given as its keys.
            key: `[B, Hkv, T, Dk]`, the same without a gradient.
            value: `[B, Hkv, T, Dv]`.
            first: of these, the first to store: those before are behind the window.
            lengths: `[B]`, int32, T.
            center: `[B, Hkv, Dk]`, float32, of a plan with one.
        """
        self._layer, self._center, self._first = layer, center, first
        self._lengths = lengths
        self._table = layer.group.table_on(layer.device)
        self.given, self.key, self.value = given, key, value
        self.is_done = False

    def show(self, query: Tensor, scaling: float) -> None:
        """Store the tokens, in the plan that suits the queries, `[B, Hq, T, Dk]`, best."""
        if not self.is_done:
            self._choose(query, scaling)
            self.store()

    def _choose(self, query: Tensor, scaling: float) -> None:
        layer, key = self._layer, self.key
        if query.shape[2] != key.shape[2] or query.device != key.device:
            return
        row, columns = layer.first_tokens.find_longest(*key.shape[::2])
        center = (
            key.new_zeros(key.shape[1], key.shape[3]) if self._center is None else self._center[row]
        )
        # Costs are in float32: 16 bits are not enough for the logits of keys with a large bias.
        with torch.autocast(key.device.type, enabled=False):
            chosen = choose_plan(
                query[row].detach(), key[row], self.value[row], center,
                (layer.options.k_plans, layer.options.v_plans), scaling, layer.group.window,
                layer.turns, columns,
            )  # fmt: skip
        if chosen is not None:
            layer.storage = chosen

    def store(self) -> None:
        """Store the tokens, unless that is done."""
        if self.is_done:
            return
        layer = self._layer
        layer.k_center = self._center if layer.storage.k.centered else None
        new = self.key[:, :, self._first :], self.value[:, :, self._first :]
        ops.write(layer._pages(self._table), *new, self._lengths, layer.backend)
        self.finish()


# `write`: that of this thread which waits for its queries; weak, since an attention that never
# comes must not keep a cache alive.
_waiting = threading.local()


def wait_for_queries(write: FirstWrite) -> None:
    """Have the attention that is next to get these keys in this thread show its queries."""
    _waiting.write = weakref.ref(write)


def show_queries(query: Tensor, key: Tensor, scaling: float) -> None:
    """Show an attention's queries, `[B, Hq, T, Dk]`, to the tokens that wait for them.

    `key` is what the attention was given: another tensor than was stored says nothing.
    """
    waiting: weakref.ref[FirstWrite] | None = getattr(_waiting, "write", None)
    write = None if waiting is None else waiting()
    if write is not None and not write.is_done and key is write.given:
        _waiting.write = None
        write.show(query, scaling)
