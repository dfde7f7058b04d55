"""Load Triton kernels of vLLM and SGLang, installed or from a folder with their sources.

An environment variable names the file. The helpers that it imports from its folder must be next to
it. Stand-ins replace all other modules of the rival.
"""

import enum
import importlib
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import torch

# Formats of K and V, with the values of vLLM's enum.
_KVQuantMode = enum.IntEnum(
    "KVQuantMode",
    "NONE FP8_PER_TENSOR INT8_PER_TOKEN_HEAD FP8_PER_TOKEN_HEAD INT4_PER_TOKEN_HEAD "
    "INT2_PER_TOKEN_HEAD",
    start=0,
)


class RivalFile(NamedTuple):
    """A file with a kernel of a rival."""

    variable: str  # environment variable with the path of the file
    module: str  # name of the module if the project is installed
    function: str  # function that `find_rival_files` looks for


VLLM = RivalFile(
    "HF_FP8KV_VLLM_ATTENTION", "vllm.v1.attention.ops.triton_unified_attention",
    "def unified_attention(",
)  # fmt: skip
SGLANG = RivalFile(
    "HF_FP8KV_SGLANG_ATTENTION", "sglang.kernels.ops.attention.decode_attention",
    "def decode_attention_fwd_grouped(",
)  # fmt: skip


class _FalsyModule(ModuleType):
    """A stand-in for settings and platforms. Its attributes are falsy, and calls return False."""

    def __bool__(self) -> bool:
        return False

    def __call__(self, *_args: object, **_kwargs: object) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _FalsyModule(name)


def find_rival_files(folder: Path) -> dict[str, str]:
    """Return the environment variables with the paths of the kernels' files in a folder."""
    paths = sorted(folder.rglob("*.py"))
    return {
        rival.variable: str(path)
        for rival in (VLLM, SGLANG) for path in paths
        if path.stem == rival.module.rpartition(".")[2] and rival.function in path.read_text()
    }  # fmt: skip


def load_rival(rival: RivalFile) -> Any:
    """Import the file that the environment variable names, or the installed module.

    Raises:
        FileNotFoundError: The path in the environment variable is not a file.
        Exception: Any error of the import.
    """
    path = os.environ.get(rival.variable)
    if not path:
        return importlib.import_module(rival.module)
    file = Path(path)
    package, _, name = rival.module.rpartition(".")
    if not file.is_file():
        raise FileNotFoundError(f"{rival.variable}: expected the path of {name}.py, got {path}")
    # The context restores `sys.modules`, so no other import finds a stand-in.
    with mock.patch.dict(sys.modules, _make_stand_ins(package, file.parent)):
        return importlib.import_module(f"{package}.{file.stem}")


def _make_stand_ins(package: str, folder: Path) -> Mapping[str, ModuleType]:
    """Return stand-ins by module name. Only modules of `package` are imported from `folder`."""
    import triton
    import triton.language

    platform: Any = _FalsyModule("platform")
    platform.fp8_dtype = lambda: torch.float8_e4m3fn
    parts = package.split(".")
    parents = {".".join(parts[:n]): {"__path__": []} for n in range(1, len(parts))}
    attributes: dict[str, dict[str, Any]] = {
        **parents,
        package: {"__path__": [str(folder)]},
        "vllm.logger": {"init_logger": logging.getLogger},
        "vllm.platforms": {"current_platform": platform},
        "vllm.triton_utils": {"triton": triton, "tl": triton.language},
        "vllm.v1.kv_cache_interface": {"KVQuantMode": _KVQuantMode},
    }
    modules = {name: ModuleType(name) for name in attributes}
    for name, module in modules.items():
        vars(module).update(attributes[name])
    settings_modules = ("vllm.envs", "sglang.srt.environ", "sglang.srt.utils")
    modules |= {name: _FalsyModule(name) for name in settings_modules}
    # `import vllm.envs; vllm.envs.X` reads the attribute of the package.
    for name in settings_modules:
        parent, _, child = name.rpartition(".")
        setattr(modules.setdefault(parent, ModuleType(parent)), child, modules[name])
    return modules
