"""The state of a forward pass that transformers does not pass as an argument.

The state is in one thread-local object. (Dynamo of torch 2.13 can trace its attributes in one
graph, but not `ContextVar.set`.)

The cache sets a `MaskRequest` when transformers reads the sizes of a mask. The mask function of
"fp8_paged" takes the request, unless its mask has different sizes. Other attention ignores it.
"""

import threading
from typing import Any, NamedTuple
from weakref import ReferenceType


class MaskRequest(NamedTuple):
    """A mask that a cache needs.

    Attributes:
        sizes: Number of new tokens, number of mask columns, and position of the first column.
        is_preallocated: Whether there are columns without tokens after the new tokens.
        is_growing: Whether the cache is growing. The padding mask must then cover all columns.
        is_stored: Whether attention receives stored keys.
    """

    sizes: tuple[int, int, int] | None = None
    is_preallocated: bool = False
    is_growing: bool = False
    is_stored: bool = False


class _ForwardPass(threading.local):
    """The forward pass that runs in this thread.

    Attributes:
        is_exact: Whether K and V stay unrounded with any cache.
        is_engine_step: Whether a continuous-batching engine runs this step. It needs no masks.
        request: The last cache's request for a mask, until the mask is made.
        first_layer: Weak references to the `PagedLayers` whose first layer has just stored its
            tokens, and to the keys that it returned.
    """

    is_exact: bool = False
    is_engine_step: bool = False
    request: MaskRequest = MaskRequest()
    first_layer: tuple[ReferenceType[Any], ReferenceType[Any]] | None = None

    def take_request(self, *sizes: int) -> MaskRequest:
        """Return and clear the request for a mask of these sizes, or return an empty request."""
        request = self.request
        self.request = MaskRequest()
        return request if request.sizes == sizes else self.request


forward_pass = _ForwardPass()
