"""Recognition of the pattern of transformers' mask functions: causal, with a window, or neither.

transformers does not label its patterns. It combines functions that compare two positions. The code
of such a function identifies it, and its closure contains its parts or its window.
"""

from collections.abc import Callable
from typing import Any

import torch
from transformers.masking_utils import and_masks, causal_mask_function, sliding_window_overlay

_INTERSECTION, _WINDOW = and_masks().__code__, sliding_window_overlay(1).__code__


def causal_window(
    function: Callable[..., Any], *, plain: bool = False, local_size: int | None = None
) -> int | None:
    """Return the window of a causal pattern, 0 without a window, or None for any other pattern.

    torch.compile cannot read closures. There the window is `local_size`, as transformers passes it,
    if the function is `plain`: positions are not packed, the config has no chunks, and no function
    of a caller is involved (these use vmap). Blocks use a different function.
    """
    if function is causal_mask_function:
        return 0
    if torch.compiler.is_compiling():
        return local_size if plain and getattr(function, "__name__", "") == "and_mask" else None
    parts: list[Any] = [function]
    windows, is_causal = list[int](), False
    while parts:
        part = parts.pop()
        code = getattr(part, "__code__", None)
        if part is causal_mask_function:
            is_causal = True
        elif code is _INTERSECTION:
            parts += part.__closure__[0].cell_contents
        elif code is _WINDOW:
            windows.append(part.__closure__[0].cell_contents)
        else:
            return None
    return min(windows, default=0) if is_causal else None
