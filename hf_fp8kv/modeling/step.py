"""What a thread runs: facts of a forward pass that no argument of transformers carries.

They are attributes of one thread-local object. (Dynamo of torch 2.13 traces these in one graph, and
cannot trace `ContextVar.set`.)

A cache that is asked for the sizes of a mask leaves a `MaskRequest`, and "fp8_paged" takes it.
Under another attention it stays until the next request, and a mask of other sizes ignores it.
"""

import threading
from typing import Any, NamedTuple


class MaskRequest(NamedTuple):
    """A mask that a cache needs.

    Attributes:
        sizes: New tokens, columns of the mask, and the position of the first column.
        preallocated: Whether columns after the new tokens are room that is not filled.
        growing: Whether the cache grows. The mask of the text must then cover all columns.
        observer: The `FirstTokens` of the cache. None means that nothing depends on padding.
    """

    sizes: tuple[int, int, int] | None = None
    preallocated: bool = False
    growing: bool = False
    observer: Any = None


class _Step(threading.local):
    """What this thread runs.

    Attributes:
        exact: Whether K and V stay unrounded, whatever cache a call has.
        engine: Whether an engine of continuous batching runs, which needs no masks.
        request: The mask that the last cache asked for, until it is made.
    """

    exact: bool = False
    engine: bool = False
    request: MaskRequest = MaskRequest()

    def take_request(self, *sizes: int) -> MaskRequest:
        """Return the request for a mask of these sizes, once, or an empty one."""
        request, self.request = self.request, MaskRequest()
        return request if request.sizes == sizes else self.request


step = _Step()
