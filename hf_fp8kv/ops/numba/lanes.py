"""Sixteen float32 lanes inside numba: how an LLVM instruction becomes a function of kernels.

numba alone leaves the inner loops to LLVM's vectorizer, which then spends more than half of a
decode step on checks and on sums across lanes. So kernels are written with vector instructions:
memory.py reads and writes them, arithmetic.py computes. LLVM splits them on a CPU with narrower
ones. Memory is read and written at plain addresses (int64).
"""

import functools
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, cast

import numba
from llvmlite import binding, ir
from numba import core, extending

from .. import visibility

# Without annotations of their own.
cgutils: Any = core.cgutils
types: Any = core.types
models: Any = extending.models
_config: Any = core.config
LANES = 16
Floats: TypeAlias = Any  # sixteen float32 numbers
Call: TypeAlias = Any  # the record of one call of a kernel
_Function = TypeVar("_Function", bound=Callable[..., Any])
I8, I16, I32, I64 = (ir.IntType(n) for n in (8, 16, 32, 64))
HALF_IR, FLOAT_IR = ir.HalfType(), ir.FloatType()


def has_feature(name: str) -> bool:
    """Return whether kernels are compiled for a feature of this CPU, such as "avx512f".

    Settings of numba (`NUMBA_CPU_NAME`, `NUMBA_CPU_FEATURES`) may leave out what the CPU has.
    """
    chosen = (_config.CPU_FEATURES or "").split(",")
    if f"+{name}" in chosen or f"-{name}" in chosen:
        return f"+{name}" in chosen
    if _config.CPU_NAME is not None and _config.CPU_FEATURES is not None:
        return False  # a CPU of this name may have it or not
    return bool(binding.get_host_cpu_features().get(name))


def vector_of(element: ir.Type) -> ir.VectorType:
    return ir.VectorType(element, LANES)


FLOAT_VECTOR = vector_of(FLOAT_IR)
# A part of a kernel is called from kernels only: without wrappers it compiles faster.
_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
_PART: dict[str, Any] = {**_OPTIONS, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}


def jit(function: _Function) -> _Function:
    """Compile a part of a kernel."""
    return cast(_Function, numba.njit(**_PART)(function))


def kernel(function: _Function) -> _Function:
    """Compile a kernel that lets other threads run; kept on disk where there is a folder for it.

    numba compiles again when the file of `function` changes, and when one of its closure variables
    does; what it calls in other files does not count.
    """
    try:
        return cast(_Function, numba.njit(cache=True, **_OPTIONS)(function))
    except RuntimeError:  # numba finds no folder that it may write to
        return cast(_Function, numba.njit(**_OPTIONS)(function))


class _FloatsType(types.Type):  # type: ignore[misc]  # numba's classes are Any
    pass


class _CodesType(types.Type):  # type: ignore[misc]
    pass


def _model(element: ir.Type) -> type:
    class Model(models.PrimitiveModel):  # type: ignore[misc]
        def __init__(self, manager: Any, numba_type: Any) -> None:
            super().__init__(manager, numba_type, vector_of(element))

    return Model


extending.register_model(_FloatsType)(_model(FLOAT_IR))
extending.register_model(_CodesType)(_model(I8))
VECTOR, CODES = _FloatsType("float32x16"), _CodesType("uint8x16")
INT, SCALAR = types.int64, types.float32


def operation(result: Any, *arguments: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make `emit(builder, *values) -> value` a function of kernels, with these numba types."""

    def decorate(emit: Callable[..., Any]) -> Callable[..., Any]:
        def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
            value = emit(builder, *values)
            return context.get_dummy_value() if result is types.none else value

        @functools.wraps(emit)
        def typed(_context: Any, *_types: Any) -> Any:
            return result(*arguments), generate

        return cast(Callable[..., Any], extending.intrinsic(typed))

    return decorate


def spread(builder: Any, value: Any, element: ir.Type) -> Any:
    """Return a vector whose lanes all hold `value`, an int64 (its low bits) or a float32."""
    if isinstance(element, ir.IntType) and element.width < value.type.width:
        value = builder.trunc(value, element)
    empty = ir.Constant(vector_of(element), ir.Undefined)
    first = builder.insert_element(empty, value, ir.Constant(I32, 0))
    return builder.shuffle_vector(first, empty, ir.Constant(vector_of(I32), [0] * LANES))


def constant(element: ir.Type, value: float) -> ir.Constant:
    return ir.Constant(vector_of(element), [value] * LANES)


def call_intrinsic(builder: Any, name: str, result: ir.Type, *values: Any) -> Any:
    kind = ir.FunctionType(result, [v.type for v in values])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), values)


def pointer_to(builder: Any, address: Any, kind: ir.Type) -> Any:
    return builder.inttoptr(address, kind.as_pointer())


def _stamp() -> int:
    """Return a number that changes with the kernels' files: numba itself looks at one file only."""
    files = [Path(visibility.__file__), *sorted(Path(__file__).parent.glob("*.py"))]
    return zlib.crc32(b"".join(f.read_bytes() for f in files)) | 1


STAMP = _stamp()
