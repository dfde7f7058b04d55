"""Repairs of Triton's interpreter (3.6 to 3.9): it then computes what a GPU computes.

They replace private functions of `triton.runtime.interpreter`: another Triton may need others.

Left alone it cuts float32 to bfloat16 without rounding, rounds float32 to an 8-bit float wrongly,
reads the NaN codes of 8-bit floats as numbers, computes with the bit patterns of bfloat16, lets a
NaN through a maximum, does not know the FNUZ formats, takes a comparison of scalars for numbers,
and needs numpy < 2.4 for a loop whose bound is loaded. TRITON_INTERPRET=1 must be set before Triton
is imported: conftest.py does that.

Three more changes save half of its time: the language is patched once per launch instead of in
every call of a device function, overflow of integers is not computed for a check that is off, and
the numpy type of a type is looked up once.
"""

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

__all__ = ["repair"]

_FLOATS = {
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
    tl.float8e4b8: torch.float8_e4m3fnuz,
    tl.float8e5b16: torch.float8_e5m2fnuz,
    tl.bfloat16: torch.bfloat16,
    tl.float16: torch.float16,
    tl.float32: torch.float32,
    tl.float64: torch.float64,
}
# The types that the interpreter keeps as bit patterns.
_AS_BITS = tuple(t for t in _FLOATS if t not in (tl.float16, tl.float32, tl.float64))
_SIGNED = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}
_POINTER = np.dtype(np.uint64)
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}

Builder = interpreter.InterpreterBuilder
Handle = interpreter.TensorHandle


@functools.cache
def repair() -> None:
    """Repair the interpreter of this process, once."""
    interpreter._convert_float = _convert
    _look_types_up_once()
    _repair_casts()
    _repair_arithmetic()
    _repair_maximum()
    _repair_reductions()
    _repair_language()
    _patch_once_per_launch()
    # What it computes is checked in debug mode only.
    TritonSemantic.binary_op_sanitize_overflow_impl = lambda *_: None
    _silence()


def _convert(data: np.ndarray, source: Any, target: Any, rounding: Any) -> np.ndarray:
    """Return the bits of `data`, numbers of type `source`, as `target`.

    They are rounded to nearest, ties to even. 8-bit floats saturate, as `cvt.rn.satfinite` of PTX
    does; NaN stays NaN.
    """
    bits = np.ascontiguousarray(data).view(_SIGNED[data.dtype.itemsize])
    x = torch.from_numpy(bits.reshape(-1).copy()).view(_FLOATS[source])
    x = x.double() if source == tl.float64 else x.float()
    to = _FLOATS[target]
    if rounding == interpreter._ir.ROUNDING_MODE.RTZ:
        assert target == tl.bfloat16, f"rounding towards zero is not repaired for {target}"
        x = (x.float().view(torch.int32) & -0x10000).view(torch.float32)
    if to.itemsize == 1:
        x = x.clamp(-torch.finfo(to).max, torch.finfo(to).max)
    signed = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[to.itemsize]
    found = x.to(to).view(signed).numpy().view(_UNSIGNED[to.itemsize])
    return found.reshape(data.shape)


def _widened(handle: Any) -> Any:
    """Return `handle` as float32 if its numbers are kept as bit patterns."""
    kind = handle.dtype.scalar
    if kind not in _AS_BITS or handle.data.dtype.kind != "u":
        return handle
    return Handle(_convert(handle.data, kind, tl.float32, None).view(np.float32), tl.float32)


def _narrowed(handle: Any) -> Any:
    """Return a float32 result as bfloat16, the outcome of a comparison as it is."""
    if handle.data.dtype.kind != "f":
        return handle
    data = handle.data.astype(np.float32)
    return Handle(_convert(data, tl.float32, tl.bfloat16, None), tl.bfloat16)


def _is_bfloat16(value: Any) -> bool:
    return isinstance(value, Handle) and value.dtype.scalar == tl.bfloat16


def _repair_casts() -> None:
    cast = Builder.cast_impl

    def cast_impl(self: Any, source: Any, kind: Any) -> Any:
        if source.dtype.scalar == kind.scalar:
            return source
        if source.dtype.scalar == tl.bfloat16:
            source = _widened(source)
        if kind.scalar == tl.bfloat16:
            return _narrowed(cast(self, source, tl.float32))
        return cast(self, source, kind)

    Builder.cast_impl = cast_impl


def _repair_arithmetic() -> None:
    def in_float32(operation: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(operation)
        def wrapped(self: Any, *operands: Any) -> Any:
            if any(_is_bfloat16(x) for x in operands):
                wide = (_widened(x) if isinstance(x, Handle) else x for x in operands)
                return _narrowed(operation(self, *wide))
            found = operation(self, *operands)
            # The outcome of a comparison keeps the type of what was compared, and as a block of it
            # is no mask any more for Triton 3.9.
            return Handle(found.data, tl.int1) if found.data.dtype == bool else found

        return wrapped

    for name in ("binary_op", "unary_op", "ternary_op", "create_fma"):
        setattr(Builder, name, in_float32(getattr(Builder, name)))

    dot = Builder.create_dot

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(self, _widened(a), _widened(b), *rest)

    Builder.create_dot = create_dot


def _repair_maximum() -> None:
    """Take the number of a number and NaN, as the GPU does unless told to pass NaN on."""
    Builder.create_maxnumf = lambda self, a, b: self.binary_op(a, b, np.fmax)
    Builder.create_minnumf = lambda self, a, b: self.binary_op(a, b, np.fmin)

    def clamp(self: Any, x: Any, low: Any, high: Any, propagate: Any) -> Any:
        ignore = propagate == interpreter._ir.PROPAGATE_NAN.NONE
        top, bottom = (np.fmin, np.fmax) if ignore else (np.minimum, np.maximum)
        return self.ternary_op(x, low, high, lambda x, low, high: top(bottom(x, low), high))

    Builder.create_clampf = clamp


def _repair_reductions() -> None:
    reduce = interpreter.ReduceOps.apply_impl
    of_numbers = {tl.standard._elementwise_max: np.fmax, tl.standard._elementwise_min: np.fmin}

    def wide(x: Any) -> Any:
        if x.dtype.scalar != tl.bfloat16:
            return x
        kind = tl.block_type(tl.float32, x.shape) if x.type.is_block() else tl.float32
        return tl.tensor(_widened(x.handle), kind)

    def apply_impl(self: Any, given: tuple[Any, ...]) -> Any:
        inputs = tuple(wide(x) for x in given)
        choose = of_numbers.get(self.combine_fn)
        if choose is not None and inputs[0].dtype.is_floating():
            data = choose.reduce(inputs[0].handle.data, axis=self.axis, keepdims=self.keep_dims)
            found = self.to_tensor(data, inputs[0].dtype)
        else:
            found = reduce(self, inputs)
        results = found if isinstance(found, list | tuple) else [found]
        for result, before, after in zip(results, given, inputs, strict=False):
            if before is not after and result.dtype.scalar == tl.float32:
                result.handle = _narrowed(result.handle)
                result.dtype = tl.bfloat16
                result.type = (
                    tl.block_type(tl.bfloat16, result.shape)
                    if result.type.is_block()
                    else tl.bfloat16
                )
        return found

    interpreter.ReduceOps.apply_impl = apply_impl


def _repair_language() -> None:
    """Add the FNUZ types, and take an array of one element as a loop's bound."""
    patch_core, patch_tensor = interpreter._patch_lang_core, interpreter._patch_lang_tensor

    def patch_lang_core(lang: Any, scope: Any) -> None:
        patch_core(lang, scope)
        to_ir = lang.dtype.to_ir

        def with_fnuz(self: Any, builder: Any) -> Any:
            if self.name in ("fp8e4b8", "fp8e5b16"):
                return tl.float8e4b8 if self.name == "fp8e4b8" else tl.float8e5b16
            return to_ir(self, builder)

        scope.set_attr(lang.dtype, "to_ir", with_fnuz)

    def patch_lang_tensor(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_core = patch_lang_core
    interpreter._patch_lang_tensor = patch_lang_tensor


def _patch_once_per_launch() -> None:
    """Patch the language when a kernel is launched, and leave it so until the launch ends.

    A device function is then called without patching it again, whichever module it is from.
    """
    patch = interpreter._patch_lang
    everything = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return self.rewrite()(*args, **kwargs)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    interpreter._patch_lang = lambda _: patch(everything)
    interpreter.InterpretedFunction.__call__ = call


def _look_types_up_once() -> None:
    """Look the numpy type of a type up in a table that is made once, not in every call."""
    of_scalar = functools.cache(interpreter._get_np_dtype)

    def get_np_dtype(kind: Any) -> np.dtype:
        scalar = kind.element_ty if isinstance(kind, tl.block_type) else kind
        return _POINTER if isinstance(scalar, tl.pointer_type) else of_scalar(scalar)

    interpreter._get_np_dtype = get_np_dtype


def _silence() -> None:
    """Silence warnings of overflow, division by zero and NaN: a GPU gives none."""
    run = interpreter.GridExecutor.__call__

    @functools.wraps(run)
    def quietly(self: Any, *args: Any, **kwargs: Any) -> None:
        with np.errstate(all="ignore"):
            run(self, *args, **kwargs)

    interpreter.GridExecutor.__call__ = quietly


assert triton.knobs.runtime.interpret, "set TRITON_INTERPRET=1 before Triton is imported"
