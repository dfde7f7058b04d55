"""A Triton driver whose device executes PTX on the CPU.

Triton compiles as for a GPU of the target that `get_target` returns, up to PTX, and launches
through this driver with the tensors that the host passes.
"""

import functools
import struct
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend

from hf_fp8kv.ops.triton.target import get_target

from .instructions import compile_program
from .machine import execute
from .memory import GlobalMemory
from .parse import Program, parse


class Kernel(NamedTuple):
    """A compiled kernel: its PTX, and the bytes of shared memory of a program."""

    ptx: str
    shared_size: int


# Function that changes the PTX of kernels before execution. Tests insert faults with it.
edit_ptx: Callable[[str], str] | None = None


@functools.lru_cache(512)
def _parse_and_compile(ptx: str) -> tuple[Program, list[Any]]:
    program = parse(ptx)
    return program, compile_program(program)


def activate() -> None:
    """Make Triton compile for this device, and launch kernels on it, in this process."""
    # PTX is the last stage, so Triton makes no cubin.
    CUDABackend.binary_ext = property(lambda _: "ptx", lambda *_: None)
    triton.knobs.runtime.add_stages_inspection_hook = _end_with_ptx
    utils = SimpleNamespace(
        get_device_properties=lambda _: {"max_shared_mem": 227 << 10},
        load_binary=lambda _name, ptx, shared, _: (None, Kernel(ptx.decode(), shared), 0, 0, 1024),
    )
    driver = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", _get_arch(), 32),
        get_active_torch_device=lambda: torch.device("cpu"),
        # Triton caches kernels by device, so each architecture is a device.
        get_current_device=_get_arch,
        get_current_stream=lambda _: 0,
        launcher_cls=_Launcher,
        utils=utils,
    )
    triton.runtime.driver.set_active(driver)


def _get_arch() -> int:
    return int(get_target(torch.device("cpu")).arch)


def _end_with_ptx(*arguments: Any) -> Any:
    if not arguments:
        return "ptx", "ptx"
    stages = arguments[1]
    del stages["cubin"]
    return None


class _Launcher:
    def __init__(self, source: Any, _: Any) -> None:
        self.signature = tuple(source.signature.values())

    def __call__(self, x: int, y: int, z: int, _stream: int, kernel: Kernel, *values: Any) -> None:
        # The first four values are metadata and hooks.
        leaves = list(_flatten(self.signature, values[4:]))
        tensors = [value for _, value in leaves if isinstance(value, torch.Tensor)]
        # The offsets of pages may lead to blocks that are not arguments themselves.
        tensors += [block for tensor in tensors for block in vars(tensor).get("blocks", ())]
        arguments = [_to_bits(type_name, value) for type_name, value in leaves]
        ptx = edit_ptx(kernel.ptx) if edit_ptx is not None else kernel.ptx
        program, code = _parse_and_compile(ptx)
        # The last two parameters are addresses of scratch memory, which no kernel uses.
        execute(
            program, code, [*arguments, 0, 0], (x, y, z), GlobalMemory(tensors), kernel.shared_size
        )


def _flatten(signature: Any, values: Any) -> Iterator[tuple[str, Any]]:
    for type_name, value in zip(signature, values, strict=True):
        if isinstance(type_name, tuple):
            yield from _flatten(type_name, value)
        elif type_name != "constexpr":
            yield type_name, value


def _to_bits(type_name: str, value: Any) -> int:
    if type_name[0] == "*":
        return value.data_ptr() if isinstance(value, torch.Tensor) else int(value or 0)
    if type_name == "fp32":
        return struct.unpack("<I", struct.pack("<f", value))[0]
    return int(value) & (1 << 64) - 1
