"""Load the Triton kernel of vLLM, installed or from a folder with its sources.

The environment variable `VARIABLE` names the file. The helpers that it imports from its folder must
be next to it. Stand-ins replace all other modules of vLLM.
"""

import enum
import importlib
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch

VARIABLE = "HF_FP8KV_VLLM_ATTENTION"
PACKAGE, NAME = "vllm.v1.attention.ops", "triton_unified_attention"
# Formats of K and V, with the values of vLLM's enum.
_KVQuantMode = enum.IntEnum(
    "KVQuantMode",
    "NONE FP8_PER_TENSOR INT8_PER_TOKEN_HEAD FP8_PER_TOKEN_HEAD INT4_PER_TOKEN_HEAD "
    "INT2_PER_TOKEN_HEAD",
    start=0,
)


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


def load_vllm() -> Any:
    """Import the file that the environment variable names, or the installed module.

    Raises:
        FileNotFoundError: The path in the environment variable is not a file.
        Exception: Any error of the import.
    """
    path = os.environ.get(VARIABLE)
    if not path:
        return importlib.import_module(f"{PACKAGE}.{NAME}")
    file = Path(path)
    if not file.is_file():
        raise FileNotFoundError(f"{VARIABLE}: expected the path of {NAME}.py, got {path}")
    # The context restores `sys.modules`, so no other import finds a stand-in.
    with mock.patch.dict(sys.modules, _make_stand_ins(file.parent)):
        return importlib.import_module(f"{PACKAGE}.{file.stem}")


def _make_stand_ins(folder: Path) -> Mapping[str, ModuleType]:
    """Return stand-ins by module name. Only modules of `PACKAGE` are imported from `folder`."""
    import triton
    import triton.language

    platform: Any = _FalsyModule("platform")
    platform.fp8_dtype = lambda: torch.float8_e4m3fn
    parts = PACKAGE.split(".")
    attributes: dict[str, dict[str, Any]] = {
        **{".".join(parts[:n]): {"__path__": []} for n in range(1, len(parts))},
        PACKAGE: {"__path__": [str(folder)]},
        "vllm.logger": {"init_logger": logging.getLogger},
        "vllm.platforms": {"current_platform": platform},
        "vllm.triton_utils": {"triton": triton, "tl": triton.language},
        "vllm.v1.kv_cache_interface": {"KVQuantMode": _KVQuantMode},
    }
    modules = {name: ModuleType(name) for name in attributes}
    for name, module in modules.items():
        vars(module).update(attributes[name])
    # `import vllm.envs as envs` reads the attribute of the package.
    modules["vllm.envs"] = modules["vllm"].envs = _FalsyModule("vllm.envs")
    return modules
