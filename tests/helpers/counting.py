"""A counter of the bytes that operations write. Unlike run times, the count is reproducible."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class WrittenBytesCounter(TorchDispatchMode):
    """Counts the bytes of every tensor that torch allocates or writes to, except views."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        outputs = (result,) if len(function._schema.returns) == 1 else result or ()
        for output, declared in zip(outputs, function._schema.returns, strict=True):
            is_view = declared.alias_info is not None and not declared.alias_info.is_write
            tensors = output if isinstance(output, (tuple, list)) else (output,)
            for tensor in tensors:
                if isinstance(tensor, torch.Tensor) and not is_view:
                    self.num_bytes += tensor.nbytes
        return result
