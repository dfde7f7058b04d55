"""vLLM's Triton attention: of an installed vLLM, or of a file that the user has brought.

The file is `vllm/v1/attention/ops/triton_unified_attention.py` of a source archive, beside the
helpers that it imports from its own folder. What else it imports of vLLM has stand-ins here.
"""

import enum
import importlib
import importlib.util
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

# The environment variable that names the file.
VARIABLE = "HF_FP8KV_VLLM_ATTENTION"
_OPS = "vllm.v1.attention.ops"


class _KVQuantMode(enum.IntEnum):
    """How K and V are stored, with vLLM's own numbers."""

    NONE = 0
    FP8_PER_TENSOR = 1
    INT8_PER_TOKEN_HEAD = 2
    FP8_PER_TOKEN_HEAD = 3
    INT4_PER_TOKEN_HEAD = 4
    INT2_PER_TOKEN_HEAD = 5


class _Platform:
    """As much of a platform as the file asks for: an NVIDIA GPU."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_args, **_kwargs: torch.float8_e4m3fn if name == "fp8_dtype" else False


class _Nothing(ModuleType):
    """Settings of vLLM, none of which is set."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return False


def load_vllm_attention() -> Any | None:
    """Return a module with `unified_attention` and `KVQuantMode`, or None.

    Raises what importing other people's code may raise; FileNotFoundError if the variable names no
    file.
    """
    path = os.environ.get(VARIABLE)
    if path:
        return _load_file(Path(path))
    if importlib.util.find_spec("vllm") is None:
        return None
    return importlib.import_module(f"{_OPS}.triton_unified_attention")


def _load_file(path: Path) -> Any:
    if not path.is_file():
        raise FileNotFoundError(f"{VARIABLE}: expected triton_unified_attention.py, got {path}")
    with _stand_ins(path.parent):
        return importlib.import_module(f"{_OPS}.{path.stem}")


@contextmanager
def _stand_ins(folder: Path) -> Iterator[None]:
    """Make modules of vLLM importable: those of `folder`, and stand-ins for a few others."""
    import triton
    import triton.language

    packages = [".".join(_OPS.split(".")[:i]) for i in range(1, 5)]
    modules: dict[str, ModuleType] = {name: ModuleType(name) for name in packages}
    for module in modules.values():
        module.__path__ = []
    modules[_OPS].__path__ = [str(folder)]
    facts: dict[str, dict[str, Any]] = {
        "vllm.logger": {"init_logger": logging.getLogger},
        "vllm.platforms": {"current_platform": _Platform()},
        "vllm.triton_utils": {"triton": triton, "tl": triton.language},
        "vllm.v1.kv_cache_interface": {"KVQuantMode": _KVQuantMode},
    }
    for name, content in facts.items():
        modules[name] = ModuleType(name)
        vars(modules[name]).update(content)
    modules["vllm.envs"] = _Nothing("vllm.envs")
    modules["vllm"].envs = modules["vllm.envs"]  # type: ignore[attr-defined]
    before = {name: module for name, module in sys.modules.items() if _is_vllm(name)}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in filter(_is_vllm, list(sys.modules)):
            del sys.modules[name]
        sys.modules.update(before)


def _is_vllm(name: str) -> bool:
    return name.partition(".")[0] == "vllm"
