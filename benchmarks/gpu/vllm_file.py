"""Load vLLM's Triton attention from an installed vLLM, or from one file of vLLM's source.

The file is `vllm/v1/attention/ops/triton_unified_attention.py`. The helpers that it imports from
its folder must be next to it. Stand-ins replace all other modules of vLLM that it imports.
"""

import enum
import importlib
import logging
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch

# Name of the environment variable that contains the path of the file.
PATH_VARIABLE = "HF_FP8KV_VLLM_ATTENTION"
_OPS_PACKAGE = "vllm.v1.attention.ops"
ATTENTION_MODULE = f"{_OPS_PACKAGE}.triton_unified_attention"


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


def load_vllm_attention(name: str) -> Any:
    """Import the module `name` of vLLM, or the file at the path in `PATH_VARIABLE`, if it is set.

    Raises:
        FileNotFoundError: The path in the environment variable is not a file.
        Exception: Any error of the import.
    """
    path = os.environ.get(PATH_VARIABLE)
    if not path:
        return importlib.import_module(name)
    file = Path(path)
    if not file.is_file():
        raise FileNotFoundError(
            f"{PATH_VARIABLE}: expected the path of triton_unified_attention.py, got {path}"
        )
    # The context restores `sys.modules`, so no other import finds a stand-in.
    with mock.patch.dict(sys.modules, _make_stand_ins(file.parent)):
        return importlib.import_module(f"{_OPS_PACKAGE}.{file.stem}")


def _make_stand_ins(folder: Path) -> dict[str, ModuleType]:
    """Return stand-ins by module name. Only modules of attention are imported from `folder`."""
    import triton
    import triton.language

    platform: Any = _FalsyModule("platform")
    platform.fp8_dtype = lambda: torch.float8_e4m3fn
    attributes: dict[str, dict[str, Any]] = {
        "vllm": {"__path__": [], "envs": _FalsyModule("vllm.envs")},
        "vllm.v1": {"__path__": []},
        "vllm.v1.attention": {"__path__": []},
        _OPS_PACKAGE: {"__path__": [str(folder)]},
        "vllm.logger": {"init_logger": logging.getLogger},
        "vllm.platforms": {"current_platform": platform},
        "vllm.triton_utils": {"triton": triton, "tl": triton.language},
        "vllm.v1.kv_cache_interface": {"KVQuantMode": _KVQuantMode},
    }
    modules = {name: ModuleType(name) for name in attributes}
    for name, module in modules.items():
        vars(module).update(attributes[name])
    return {**modules, "vllm.envs": attributes["vllm"]["envs"]}
