"""Checks of scales, centers and ranks, with the errors that say what they can be."""

import torch

from ..errors import ScaleError
from ..formats import MIN_SCALE
from ..utils.text import format_value

# Outside of these the reciprocal, or the largest code times the scale, may leave fp32.
_LOWEST, _HIGHEST = MIN_SCALE, 1 / MIN_SCALE
# What else to do about a layer that plan or scales do not have.
KEEP_OUT = "keep the layer out with skip_layers (of a cache; serving has every layer in pages)"
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def check_ranks(tp_rank: int, tp_size: int) -> None:
    """Raise ScaleError unless `0 <= tp_rank < tp_size`."""
    for value in (tp_rank, tp_size):
        if isinstance(value, bool) or not isinstance(value, int):
            raise ScaleError(f"tp_rank, tp_size: expected integers, got {value!r}; pass int")
    if not 0 <= tp_rank < tp_size:
        raise ScaleError(
            f"expected 0 <= tp_rank < tp_size, got tp_rank={tp_rank} and tp_size={tp_size}; one "
            "process is rank 0 of 1"
        )


def scalar(value: float) -> torch.Tensor:
    """Return a number as float32 on the CPU, whatever torch's default dtype and device are."""
    return torch.tensor(value, dtype=torch.float32, device="cpu")


def check_constant(value: object, what: str) -> float:
    """Return a number as a float; raise ScaleError unless it can be a scale."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    # Compared before it is converted: an integer may be too large for a float.
    if number and _LOWEST <= value <= _HIGHEST:  # type: ignore[operator]
        return float(value)  # type: ignore[arg-type]
    raise ScaleError(
        f"{what}: expected a finite number above 0 (from 2^-100 to 2^100), got "
        f"{format_value(value)}; calibrate again, or use dynamic scales (scales=None)"
    )


def check_tensor(tensor: object, what: str, *, is_center: bool = False) -> torch.Tensor:
    """Return a scale as float32 on the CPU, `[]` or `[heads or 1, D or 1]`, or raise ScaleError.

    A center is `[heads, D]`, and may have any finite numbers.
    """
    if not isinstance(tensor, torch.Tensor) or tensor.is_meta:
        got = "a tensor on meta" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise ScaleError(f"{what}: expected a tensor with data, got {got}; pass one")
    if tensor.dtype not in _DTYPES:
        raise ScaleError(
            f"{what}: expected float32, bfloat16, float16 or float64, got {tensor.dtype}; "
            "convert it"
        )
    values = tensor.detach().to("cpu", torch.float32, copy=True).contiguous()
    shapes, numbers, valid = "[heads, D]", "finite numbers", values.isfinite()
    if not is_center:
        values = values.reshape(()) if values.numel() == 1 else values
        shapes = "[], [heads, 1], [heads, D] or [1, D]"
        numbers += " above 0 (from 2^-100 to 2^100)"
        valid = (values >= _LOWEST) & (values <= _HIGHEST)
    if values.ndim not in ((2,) if is_center else (0, 2)) or values.numel() == 0:
        raise ScaleError(
            f"{what}: expected the shape {shapes}, got {list(values.shape)}; reshape it"
        )
    if not valid.all():
        raise ScaleError(
            f"{what}: expected {numbers}, got {values[~valid][0].item()!r}; calibrate again, or "
            "use dynamic scales (scales=None)"
        )
    return values
