"""Tests of a folder with a size limit: the least recently used files of any process are removed."""

import errno
import os
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_fp8kv.prefix import folder as folder_module
from hf_fp8kv.prefix.folder import PrefixFolder, StoredFile

pytestmark = pytest.mark.text
MAX_BYTES = 100
LOCK_NAME = ".prefix_store.lock"


def name_page(number: int) -> str:
    return f"{number:064x}.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> PrefixFolder:
    return PrefixFolder(tmp_path, MAX_BYTES)


def put_file(
    folder: PrefixFolder, name: str, num_bytes: int, other_names: tuple[str, ...] = ()
) -> bool:
    with folder.lock(0.0) as lock_fd:
        assert lock_fd is not None
        is_stored = folder.put(lock_fd, name, bytes(num_bytes), {*other_names, name})
    # A store also touches all pages of a prompt after it stores them.
    used_names = (*other_names, name) if is_stored else other_names
    for used_name in used_names:
        folder.touch(used_name, time.time_ns())
    return is_stored


def sum_bytes(files: list[StoredFile]) -> int:
    return sum(file.num_bytes for file in files)


# A step has an action, the index of a folder, the size of a new file, and the index of the file
# that is touched or removed, or of the first file of a prompt.
STEPS = st.tuples(
    st.sampled_from(["put"] * 6 + ["touch"] * 3 + ["remove", "begin"]), st.integers(0, 1),
    st.integers(1, 45), st.integers(0, 5),
)  # fmt: skip


@given(steps=st.lists(STEPS, min_size=5, max_size=40))
def test_least_recently_used_files_are_removed(steps: list[tuple[str, int, int, int]]) -> None:
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as name:
        # Times of use are as exact as the clock, so it has no lag.
        patch.setattr(folder_module, "_MAX_CLOCK_LAG_NS", 0)
        path = Path(name)
        folders = [PrefixFolder(path, MAX_BYTES) for _ in range(2)]
        is_exact = True  # whether the stored total is the sum of the files
        for number, (action, folder_index, num_bytes, file_index) in enumerate(steps):
            folder = folders[folder_index]
            files_before = sorted(folder.list_files())
            if action == "begin":
                folders[folder_index] = PrefixFolder(path, MAX_BYTES)
                folders[folder_index].apply_limit()
                is_exact = True
            elif action == "put":
                prompt_names = tuple(
                    file.name for file in files_before[file_index : file_index + 2]
                )
                other_files = [file for file in files_before if file.name not in prompt_names]
                prompt_bytes = sum_bytes(files_before) - sum_bytes(other_files)
                is_stored = put_file(folder, name_page(number), num_bytes, prompt_names)
                names_after = {file.name for file in folder.list_files()}
                assert is_stored == (prompt_bytes + num_bytes <= MAX_BYTES)
                kept_files = [file for file in other_files if file.name in names_after]
                num_removed = len(other_files) - len(kept_files)
                assert kept_files == other_files[num_removed:], "the oldest files are removed"
                assert names_after.issuperset(prompt_names)
                if is_exact and num_removed:
                    freed_bytes = sum_bytes(other_files[: num_removed - 1])
                    total_bytes = sum_bytes(files_before) + num_bytes - freed_bytes
                    assert total_bytes > MAX_BYTES, "the last file was removed without need"
                if is_exact:
                    assert int((path / LOCK_NAME).read_text()) == sum_bytes(folder.list_files())
            elif files_before:
                file = files_before[file_index % len(files_before)]
                if action == "touch":
                    folder.touch(file.name, time.time_ns())
                else:  # a process removes a file without updating the total
                    (path / file.name).unlink()
                    is_exact = False
            assert sum_bytes(folder.list_files()) <= MAX_BYTES


def test_files_from_the_future_are_removed_first(folder: PrefixFolder) -> None:
    """Such files exist if the clock was set back."""
    future = time.time_ns() + 10**15
    for number in range(9):
        with folder.lock(0.0) as lock_fd:
            assert folder.put(lock_fd, name_page(number), bytes(20), ())
        if number < 5:
            folder.touch(name_page(number), future + number)
    names = sorted(file.name for file in folder.list_files())
    assert names[1:] == list(map(name_page, range(5, 9)))


@pytest.mark.parametrize("digits", [b"0" * 19, b"0" * 21, b"-" + b"0" * 19])
def test_a_damaged_total_is_recomputed(folder: PrefixFolder, digits: bytes, tmp_path: Path) -> None:
    for number in range(3):
        put_file(folder, name_page(number), 30)
    (tmp_path / LOCK_NAME).write_bytes(digits)
    assert put_file(folder, name_page(3), 30)
    assert sorted(file.name for file in folder.list_files()) == list(map(name_page, range(1, 4)))
    assert (tmp_path / LOCK_NAME).read_bytes() == b"%020d" % 90


def test_a_total_that_includes_unwritten_bytes_is_corrected(
    folder: PrefixFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is killed after it raises the total, before it writes, leaves such a total."""
    put_file(folder, name_page(0), 20)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", mock.Mock(side_effect=OSError("No space")))
        for _ in range(4):
            with pytest.raises(OSError, match="No space"):
                put_file(folder, name_page(1), 20)
    assert int((tmp_path / LOCK_NAME).read_text()) == MAX_BYTES
    assert put_file(folder, name_page(1), 70)
    assert sorted(file.num_bytes for file in folder.list_files()) == [20, 70]
    assert int((tmp_path / LOCK_NAME).read_text()) == 90


def test_a_smaller_limit_frees_space_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk has no space for the total either."""
    for number in range(3):
        put_file(PrefixFolder(tmp_path, MAX_BYTES), name_page(number), 30)
    (tmp_path / LOCK_NAME).unlink()
    folder = PrefixFolder(tmp_path, 50)
    pwrite = os.pwrite

    def write_if_it_fits(*args: Any) -> int:
        if sum_bytes(folder.list_files()) > 50:
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(*args)

    monkeypatch.setattr(os, "pwrite", write_if_it_fits)
    folder.apply_limit()
    assert [file.name for file in folder.list_files()] == [name_page(2)]
    assert int((tmp_path / LOCK_NAME).read_text()) == 30
