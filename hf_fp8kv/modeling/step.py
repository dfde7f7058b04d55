"""State of a forward pass that transformers does not pass as an argument.

The state is in one thread-local object. (Dynamo of torch 2.13 can trace its attributes in one
graph, but not `ContextVar.set`.)

When transformers reads the sizes of a mask, the cache sets a `MaskRequest`, which "fp8_paged"
takes. With a different attention the request stays until the next one, and masks of other sizes
ignore it.
"""

import threading
from typing import Any, NamedTuple


class MaskRequest(NamedTuple):
    """A mask that a cache needs.

    Attributes:
        sizes: Number of new tokens, number of columns of the mask, and position of the first
            column.
        preallocated: Whether columns after the new tokens are unfilled room.
        growing: Whether the cache is growing. The padding mask must then cover all columns.
        observer: The `FirstTokens` of the cache, or None if nothing depends on padding.
    """

    sizes: tuple[int, int, int] | None = None
    preallocated: bool = False
    growing: bool = False
    observer: Any = None


class _Step(threading.local):
    """State of the forward pass in this thread.

    Attributes:
        exact: Whether K and V stay unrounded with any cache.
        engine: Whether a continuous-batching engine runs, which needs no masks.
        request: The last cache's request for a mask, until the mask is made.
    """

    exact: bool = False
    engine: bool = False
    request: MaskRequest = MaskRequest()

    def take_request(self, *sizes: int) -> MaskRequest:
        """Return and clear the request for a mask of these sizes, or return an empty request."""
        request, self.request = self.request, MaskRequest()
        return request if request.sizes == sizes else self.request


step = _Step()
