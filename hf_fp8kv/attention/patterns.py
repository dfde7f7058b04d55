"""Recognize the pattern of transformers' mask functions: causal, causal with a window, or neither.

transformers does not label patterns. It combines functions that compare two positions. The code
object of such a function identifies it, and the closure contains the inner functions or the window.
"""

from collections.abc import Callable
from typing import Any

import torch
from transformers.masking_utils import and_masks, causal_mask_function, sliding_window_overlay

_AND_CODE, _WINDOW_CODE = and_masks().__code__, sliding_window_overlay(1).__code__


def find_window(
    function: Callable[..., Any], *, is_plain: bool = False, local_size: int | None = None
) -> int | None:
    """Return the window of a causal pattern, 0 without a window, or None for any other pattern.

    torch.compile cannot read closures. In compiled code, the window is transformers' `local_size`
    if the pattern `is_plain`: positions are not packed, the config has no chunks, and the caller
    passed no function (which needs vmap). Patterns with blocks use a different function.
    """
    if function is causal_mask_function:
        return 0
    if torch.compiler.is_compiling():
        return local_size if is_plain and getattr(function, "__name__", "") == "and_mask" else None
    functions: list[Any] = [function]
    windows, is_causal = list[int](), False
    while functions:
        inner = functions.pop()
        code = getattr(inner, "__code__", None)
        if inner is causal_mask_function:
            is_causal = True
        elif code is _AND_CODE:
            functions += inner.__closure__[0].cell_contents
        elif code is _WINDOW_CODE:
            windows.append(inner.__closure__[0].cell_contents)
        else:
            return None
    return min(windows, default=0) if is_causal else None
