"""A counter of the bytes that operations write. Unlike times, it does not depend on the machine."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class BytesWritten(TorchDispatchMode):
    """Counts the bytes of every tensor that torch allocates or writes to, except views."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0  # in bytes

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        returns = function._schema.returns
        outputs = (result,) if len(returns) == 1 else result or ()
        for output, declared in zip(outputs, returns, strict=True):
            is_view = declared.alias_info is not None and not declared.alias_info.is_write
            tensors = output if isinstance(output, (tuple, list)) else (output,)
            for tensor in tensors:
                if isinstance(tensor, torch.Tensor) and not is_view:
                    self.total += tensor.nbytes
        return result
