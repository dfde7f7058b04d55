"""Keep chosen plans in files, in `HF_HOME` and in the folders of prefix stores.

A file's name is a digest of the model, and of everything else that the choice depends on. A file is
a SHA-256, followed by the contents of `kv_scales.safetensors`. The SHA-256 includes the name, so a
damaged file and a renamed file are detected.
"""

import hashlib
import json
import logging
from pathlib import Path

import torch

from ..prefix.store import PrefixStore
from ..scales.checkpoint.checkpoint import KV_FILE
from ..scales.formats.separate_files import METADATA_KEY, HfFp8kv, parse_kv_scales
from ..scales.kv_scales import StoragePlan, wrap_scales
from ..utils.digests import can_sample
from ..utils.files import parse_metadata, read_regular_file, write_atomically

logger = logging.getLogger(__name__)

_MAX_BYTES = 1 << 28


def make_plan_path(folder: Path, key: str, model: torch.nn.Module) -> Path | None:
    """Return the path of a model's plan in a folder, or None if its weights cannot be sampled.

    Without samples of the weights, the key is random, so no process would find the file again. In
    the folder of a prefix store, no page has this path.
    """
    return folder / "plans" / f"{key}.plan" if can_sample(model) else None


def read_plan(path: Path | None) -> StoragePlan | None:
    """Return the plan in a file, or None if the file is missing, unreadable or damaged."""
    if path is None:
        return None
    try:
        file_bytes = read_regular_file(path, _MAX_BYTES)
        digest = file_bytes[: hashlib.sha256().digest_size]
        contents = file_bytes[len(digest) :]
        if digest != _compute_digest(path, contents):
            raise ValueError("its bytes or its name have changed since it was written")
        origin = json.loads(parse_metadata(contents)[METADATA_KEY])["origin"]
        plan = wrap_scales(parse_kv_scales(contents, origin))
        return plan if isinstance(plan, StoragePlan) else None
    except FileNotFoundError:
        return None
    except Exception as error:  # a file may have any contents
        logger.debug("%s is ignored: %s", path, error)
        return None


def write_plan(path: Path | None, plan: StoragePlan) -> None:
    """Write a plan atomically. Errors of the disk are only logged."""
    if path is None:
        return
    contents = HfFp8kv().make_files(plan)[KV_FILE]
    try:
        write_atomically({path: _compute_digest(path, contents) + contents})
    except OSError as error:
        logger.debug("the plan is not written to %s: %s", path, error)


def share_plan(path: Path | None, plan: StoragePlan, store: PrefixStore) -> StoragePlan:
    """Return the plan that the first process wrote. If there is none, write and return `plan`."""
    if (first_plan := read_plan(path)) is not None:
        return first_plan  # without waiting for a process that writes
    try:
        with store.lock() as lock:
            if lock is not None and (first_plan := read_plan(path)) is not None:
                return first_plan
            if lock is not None:
                write_plan(path, plan)
    except (OSError, ImportError) as error:
        logger.debug("the plan is not written to %s: %s", path, error)
    return plan


def _compute_digest(path: Path, contents: bytes) -> bytes:
    return hashlib.sha256(path.name.encode() + contents).digest()
