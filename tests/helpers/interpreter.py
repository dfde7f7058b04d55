"""Repairs of Triton's interpreter (3.6 to 3.9), so that it computes the same values as a GPU.

The repairs replace private functions of `triton.runtime.interpreter`, which may differ in other
versions. TRITON_INTERPRET=1 must be set before Triton is imported, which conftest.py does.

Without the repairs, the interpreter truncates float32 to bfloat16, rounds float32 to an 8-bit float
wrongly, reads the NaN codes of 8-bit floats as numbers, and computes with the bit patterns of
bfloat16. A maximum returns NaN if one operand is NaN, the FNUZ formats are missing, the result of
comparing scalars is a number, and a loop whose bound is loaded needs numpy < 2.4.

Further changes save half of the time that the interpreter spends on types. The language is patched
once per launch instead of in every call of a device function. Integer overflow is not checked,
because only debug mode uses the check. The type of a block is created once for each shape, and
attributes that depend only on the type once for each type.
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

_TORCH_DTYPES = {
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
    tl.float8e4b8: torch.float8_e4m3fnuz,
    tl.float8e5b16: torch.float8_e5m2fnuz,
    tl.bfloat16: torch.bfloat16,
    tl.float16: torch.float16,
    tl.float32: torch.float32,
    tl.float64: torch.float64,
}
# The types whose values the interpreter stores as bit patterns.
_BIT_TYPES = _TORCH_DTYPES.keys() - {tl.float16, tl.float32, tl.float64}

Builder = interpreter.InterpreterBuilder
Handle = interpreter.TensorHandle


@functools.cache
def repair() -> None:
    interpreter._convert_float = _convert
    _cache_block_types()
    _repair_casts()
    _repair_arithmetic()
    _repair_maximum()
    _repair_reductions()
    _repair_language()
    _patch_language_once_per_launch()
    # The results of this function are only checked in debug mode.
    TritonSemantic.binary_op_sanitize_overflow_impl = lambda *_: None
    _silence_warnings()


def _convert(data: np.ndarray, source: Any, target: Any, rounding: Any) -> np.ndarray:
    """Convert `data` from type `source` to type `target`, and return bit patterns.

    Values are rounded to nearest, ties to even, unless `rounding` is RTZ. 8-bit floats saturate, as
    in `cvt.rn.satfinite` of PTX. NaN stays NaN.
    """
    bits = np.ascontiguousarray(data).view(f"i{data.dtype.itemsize}")
    x = torch.from_numpy(bits.reshape(-1).copy()).view(_TORCH_DTYPES[source])
    x = x.double() if source == tl.float64 else x.float()
    dtype = _TORCH_DTYPES[target]
    if rounding == interpreter._ir.ROUNDING_MODE.RTZ:
        assert target == tl.bfloat16, f"rounding towards zero is not repaired for {target}"
        x = (x.float().view(torch.int32) & -0x10000).view(torch.float32)
    if dtype.itemsize == 1:
        x = x.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max)
    patterns = x.to(dtype).view(torch.uint8).numpy().view(f"u{dtype.itemsize}")
    return patterns.reshape(data.shape)


def _is_bfloat16(operand: Any) -> bool:
    return isinstance(operand, Handle) and operand.dtype.scalar == tl.bfloat16


def _to_float32(handle: Any) -> Any:
    """Return `handle` as float32 if its values are stored as bit patterns, or unchanged."""
    scalar_type = handle.dtype.scalar
    if scalar_type not in _BIT_TYPES or handle.data.dtype.kind != "u":
        return handle
    return Handle(_convert(handle.data, scalar_type, tl.float32, None).view(np.float32), tl.float32)


def _to_bfloat16(handle: Any) -> Any:
    """Return a float32 result as bfloat16, and the result of a comparison unchanged."""
    if handle.data.dtype.kind != "f":
        return handle
    data = handle.data.astype(np.float32)
    return Handle(_convert(data, tl.float32, tl.bfloat16, None), tl.bfloat16)


def _repair_casts() -> None:
    stock_cast = Builder.cast_impl

    def cast_impl(self: Any, source: Any, target: Any) -> Any:
        if source.dtype.scalar == target.scalar:
            return source
        if source.dtype.scalar == tl.bfloat16:
            source = _to_float32(source)
        if target.scalar == tl.bfloat16:
            return _to_bfloat16(stock_cast(self, source, tl.float32))
        return stock_cast(self, source, target)

    Builder.cast_impl = cast_impl


def _repair_arithmetic() -> None:
    def wrap_operation(operation: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(operation)
        def run_in_float32(self: Any, *operands: Any) -> Any:
            if any(_is_bfloat16(operand) for operand in operands):
                converted = (
                    _to_float32(operand) if isinstance(operand, Handle) else operand
                    for operand in operands
                )
                return _to_bfloat16(operation(self, *converted))
            result = operation(self, *operands)
            # Triton gives the result of a comparison the type of its operands, and Triton 3.9 does
            # not accept a block of that type as a mask.
            return Handle(result.data, tl.int1) if result.data.dtype == bool else result

        return run_in_float32

    for name in ("binary_op", "unary_op", "ternary_op", "create_fma"):
        setattr(Builder, name, wrap_operation(getattr(Builder, name)))

    stock_dot = Builder.create_dot

    def create_dot(self: Any, a: Any, b: Any, *options: Any) -> Any:
        return stock_dot(self, _to_float32(a), _to_float32(b), *options)

    Builder.create_dot = create_dot


def _repair_maximum() -> None:
    """Make a maximum ignore a NaN operand, as a GPU does unless it must propagate NaN."""
    Builder.create_maxnumf = lambda self, a, b: self.binary_op(a, b, np.fmax)
    Builder.create_minnumf = lambda self, a, b: self.binary_op(a, b, np.fmin)

    def clamp(self: Any, x: Any, low: Any, high: Any, propagate: Any) -> Any:
        ignores_nan = propagate == interpreter._ir.PROPAGATE_NAN.NONE
        minimum, maximum = (np.fmin, np.fmax) if ignores_nan else (np.minimum, np.maximum)
        return self.ternary_op(x, low, high, lambda x, low, high: minimum(maximum(x, low), high))

    Builder.create_clampf = clamp


def _repair_reductions() -> None:
    stock_reduce = interpreter.ReduceOps.apply_impl
    ufuncs = {tl.standard._elementwise_max: np.fmax, tl.standard._elementwise_min: np.fmin}

    def convert_bfloat16(x: Any) -> Any:
        if x.dtype.scalar != tl.bfloat16:
            return x
        type_ = tl.block_type(tl.float32, x.shape) if x.type.is_block() else tl.float32
        return tl.tensor(_to_float32(x.handle), type_)

    def apply_impl(self: Any, operands: tuple[Any, ...]) -> Any:
        inputs = tuple(convert_bfloat16(operand) for operand in operands)
        ufunc = ufuncs.get(self.combine_fn)
        if ufunc is not None and inputs[0].dtype.is_floating():
            data = ufunc.reduce(inputs[0].handle.data, axis=self.axis, keepdims=self.keep_dims)
            output = self.to_tensor(data, inputs[0].dtype)
        else:
            output = stock_reduce(self, inputs)
        outputs = output if isinstance(output, list | tuple) else [output]
        for result, operand, converted in zip(outputs, operands, inputs, strict=False):
            if operand is not converted and result.dtype.scalar == tl.float32:
                result.handle = _to_bfloat16(result.handle)
                result.dtype = tl.bfloat16
                result.type = (
                    tl.block_type(tl.bfloat16, result.shape)
                    if result.type.is_block()
                    else tl.bfloat16
                )
        return output

    interpreter.ReduceOps.apply_impl = apply_impl


def _repair_language() -> None:
    """Add the FNUZ types, and accept an array of one element as a loop's bound."""
    patch_core, patch_tensor = interpreter._patch_lang_core, interpreter._patch_lang_tensor

    def patch_lang_core(lang: Any, scope: Any) -> None:
        patch_core(lang, scope)
        to_ir = lang.dtype.to_ir

        def to_ir_with_fnuz(self: Any, builder: Any) -> Any:
            if self.name in ("fp8e4b8", "fp8e5b16"):
                return tl.float8e4b8 if self.name == "fp8e4b8" else tl.float8e5b16
            return to_ir(self, builder)

        scope.set_attr(lang.dtype, "to_ir", to_ir_with_fnuz)

    def patch_lang_tensor(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_core = patch_lang_core
    interpreter._patch_lang_tensor = patch_lang_tensor


def _patch_language_once_per_launch() -> None:
    """Patch the language when a kernel is launched, until the launch ends.

    Device functions of any module then run without patching the language again.
    """
    stock_patch = interpreter._patch_lang
    language = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})

    def call_kernel(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return self.rewrite()(*args, **kwargs)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    def patch_attr(owner: Any, name: str, member: Any, _builder: Any, scope: Any) -> None:
        def call_with_semantic(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = interpreter.interpreter_semantic
            return member(*args, **kwargs)

        scope.set_attr(owner, name, call_with_semantic)

    interpreter._patch_attr = patch_attr
    interpreter._patch_lang = lambda _: stock_patch(language)
    interpreter.InterpretedFunction.__call__ = call_kernel


def _cache_block_types() -> None:
    """Cache the types of blocks by element type and shape, and the attributes of their tensors."""
    block_type, tensor = tl.block_type, tl.tensor
    stock_init_type, stock_init_tensor = block_type.__init__, tensor.__init__
    types: dict[tuple[Any, ...], Any] = {}
    shapes: dict[tuple[int, ...], Any] = {}

    def new_type(cls: Any, element: Any, shape: Any) -> Any:
        if cls is not block_type:
            return object.__new__(cls)
        key = (
            id(element),
            *(size.value if isinstance(size, tl.constexpr) else size for size in shape),
        )
        created_type = types.get(key)
        if created_type is None:
            created_type = object.__new__(cls)
            stock_init_type(created_type, element, shape)
            types[key] = created_type  # keeps the element alive, so its id stays unique
        return created_type

    def init_type(self: Any, element: Any, shape: Any) -> None:
        if type(self) is not block_type:
            stock_init_type(self, element, shape)

    def init_tensor(self: Any, handle: Any, type_: Any) -> None:
        try:
            self.shape, self.numel, self.dtype = type_.tensor_attributes
        except AttributeError:
            stock_init_tensor(self, handle, type_)
            sizes = tuple(size.value for size in self.shape)
            self.shape = shapes.setdefault(sizes, self.shape)
            type_.tensor_attributes = self.shape, self.numel, self.dtype
        self.handle = handle
        self.type = type_

    block_type.__new__, block_type.__init__ = new_type, init_type
    tensor.__init__ = init_tensor
    stock_broadcast = TritonSemantic.broadcast_impl_value

    def broadcast_impl_value(self: Any, x: Any, y: Any) -> Any:
        # All scalars share one empty shape.
        return (x, y) if x.shape is y.shape else stock_broadcast(self, x, y)

    TritonSemantic.broadcast_impl_value = broadcast_impl_value


def _silence_warnings() -> None:
    """Silence numpy's warnings of overflow, division by zero and NaN. A GPU gives no warnings."""
    stock_run = interpreter.GridExecutor.__call__

    @functools.wraps(stock_run)
    def run_silently(self: Any, *args: Any, **kwargs: Any) -> None:
        with np.errstate(all="ignore"):
            stock_run(self, *args, **kwargs)

    interpreter.GridExecutor.__call__ = run_silently


assert triton.knobs.runtime.interpret, "set TRITON_INTERPRET=1 before Triton is imported"
