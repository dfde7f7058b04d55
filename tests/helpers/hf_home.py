"""Create an HF_HOME for a session of tests. Import this module before huggingface_hub.

Models keep their plans in HF_HOME, so the processes of a session share a new folder. It has links
to the converted models in the original HF_HOME.
"""

import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

_CACHE_HOME = os.environ.get("XDG_CACHE_HOME", "~/.cache")
_OLD_HOME = os.path.expanduser(os.environ.get("HF_HOME", f"{_CACHE_HOME}/huggingface"))
ORIGINAL_HF_HOME = os.environ.setdefault("ORIGINAL_HF_HOME", _OLD_HOME)
_IS_WORKER = "PYTEST_XDIST_WORKER" in os.environ  # its main process has created the folder
if not _IS_WORKER:
    os.environ["HF_HOME"] = tempfile.mkdtemp(prefix="hf_fp8kv-tests-")


def link_models() -> None:
    folder = Path(os.environ["HF_HOME"], "hf_fp8kv")
    folder.mkdir(exist_ok=True)
    for path in Path(ORIGINAL_HF_HOME, "hf_fp8kv").glob("[!.]*"):
        with suppress(FileExistsError):
            if path.name != "plans":
                (folder / path.name).symlink_to(path)


def remove_folder() -> None:
    if not _IS_WORKER:
        shutil.rmtree(os.environ["HF_HOME"], ignore_errors=True)


link_models()
