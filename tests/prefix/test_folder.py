"""A folder with a bound: the least recently used files go, of any process, and no other files."""

import errno
import os
import re
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_fp8kv.prefix import folder as folder_module
from hf_fp8kv.prefix.folder import PrefixFolder, StoredFile

pytestmark = pytest.mark.text
NAMES, BOUND = re.compile(r"page\d+"), 100


def folder_at(path: Path) -> PrefixFolder:
    return PrefixFolder(path, NAMES, BOUND)


def put(folder: PrefixFolder, name: str, size: int, own: tuple[str, ...] = ()) -> bool:
    with folder.lock(0.0) as lock:
        assert lock is not None
        is_there = folder.put(lock, name, bytes(size), {*own, name})
    for used in (*own, name) if is_there else own:  # as a store touches the pages of a prompt
        touch(folder, used)
    return is_there


def full_folder_at(path: Path) -> PrefixFolder:
    """Return a folder with pages 0 to 99 of a byte each, written before any later look."""
    folder = folder_at(path)
    for number in range(BOUND):
        put(folder, f"page{number}", 1)
    time.sleep(2 * folder_module._TICK / 1e9)
    return folder


def touch(folder: PrefixFolder, name: str) -> None:
    now = time.time_ns()
    os.utime(folder.path / name, ns=(now, now))


def total_of(files: list[StoredFile]) -> int:
    return sum(file.bytes for file in files)


@st.composite
def steps(draw: st.DrawFn) -> tuple[str, int, int, int]:
    what = draw(st.sampled_from(["put"] * 6 + ["touch"] * 3 + ["remove", "begin"]))
    return what, draw(st.integers(0, 1)), draw(st.integers(1, 45)), draw(st.integers(0, 5))


@given(plan=st.lists(steps(), min_size=5, max_size=40))
def test_the_least_recently_used_go(plan: list[tuple[str, int, int, int]]) -> None:
    with pytest.MonkeyPatch.context() as patched, tempfile.TemporaryDirectory() as name:
        # `touch` is as exact as the clock, so a tick is not necessary.
        patched.setattr(folder_module, "_TICK", 0)
        path = Path(name)
        folders, is_exact = [folder_at(path), folder_at(path)], True
        for number, (what, which, size, place) in enumerate(plan):
            folder = folders[which]
            before = sorted(folder.files())
            if what == "begin":
                folders[which] = folder_at(path)
                folders[which].hold_bound()
                is_exact = True
            elif what == "put":
                own = tuple(file.name for file in before[place : place + 2])
                others = [file for file in before if file.name not in own]
                stays = total_of(before) - total_of(others)
                is_there = put(folder, f"page{number}", size, own)
                after = {file.name for file in folder.files()}
                assert is_there == (stays + size <= BOUND)
                kept = [file for file in others if file.name in after]
                gone = others[: len(others) - len(kept)]
                assert kept == others[len(gone) :], "the oldest go"
                assert {*own} <= after
                if is_exact and gone:
                    assert total_of(before) + size - total_of(gone[:-1]) > BOUND, "and no more"
                if is_exact:
                    count = int((path / ".prefix_store.lock").read_text())
                    assert count == total_of(folder.files())
            elif before:
                file = before[place % len(before)]
                if what == "touch":
                    touch(folder, file.name)
                else:  # by a process that does not update the count
                    (path / file.name).unlink()
                    is_exact = False
            assert total_of(folder.files()) <= BOUND


def test_storing_takes_the_same_time_however_much_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_at(tmp_path)
    assert put(folder, "page0", 1)
    again = folder_at(tmp_path)
    for look in ("listdir", "scandir"):
        monkeypatch.setattr(os, look, lambda _: pytest.fail("looked at all files"))
    for number in range(1, 100):
        assert put((folder, again)[number % 2], f"page{number}", 1)


def test_removing_looks_once_for_many_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = full_folder_at(tmp_path)
    looks, scandir = [], os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: looks.append(path) or scandir(path))
    for number in range(100, 180):
        assert put(folder, f"page{number}", 1)
    assert len(looks) == 1
    assert sorted(file.name for file in folder.files()) == sorted(
        f"page{number}" for number in range(80, 180)
    )


def test_files_from_the_future_go_before_new_ones(tmp_path: Path) -> None:
    """As if the clock had been set back."""
    folder, future = folder_at(tmp_path), time.time_ns() + 10**15
    for number in range(5):
        put(folder, f"page{number}", 20)
        folder.touch(f"page{number}", future + number)
    for number in range(5, 9):
        with folder.lock(0.0) as lock:
            assert lock is not None
            assert folder.put(lock, f"page{number}", bytes(20), ())
    names = {file.name for file in folder.files()}
    assert len(names) == 5
    assert names > {"page5", "page6", "page7", "page8"}


@pytest.mark.parametrize("data", [b"", b"0" * 19, b"0" * 21, b"x" * 20, b"-" + b"0" * 19])
def test_a_damaged_count_is_made_again(data: bytes, tmp_path: Path) -> None:
    folder = folder_at(tmp_path)
    for number in range(3):
        put(folder, f"page{number}", 30)
    (tmp_path / ".prefix_store.lock").write_bytes(data)
    assert put(folder, "page3", 30)
    assert sorted(file.name for file in folder.files()) == ["page1", "page2", "page3"]
    assert (tmp_path / ".prefix_store.lock").read_bytes() == b"%020d" % 90


def test_bytes_that_were_counted_and_not_written_do_not_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if processes had been killed before they wrote."""

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    folder = folder_at(tmp_path)
    put(folder, "page0", 20)
    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", fail)
        for _ in range(4):
            with pytest.raises(OSError, match="No space"):
                put(folder, "page1", 20)
    assert int((tmp_path / ".prefix_store.lock").read_text()) == BOUND
    assert put(folder, "page1", 70)
    assert sorted(file.name for file in folder.files()) == ["page0", "page1"]
    assert int((tmp_path / ".prefix_store.lock").read_text()) == 90


def test_a_smaller_bound_makes_room_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk has no room for the count."""
    for number in range(3):
        put(folder_at(tmp_path), f"page{number}", 30)
    (tmp_path / ".prefix_store.lock").unlink()
    smaller, write = PrefixFolder(tmp_path, NAMES, 50), os.pwrite

    def write_if_there_is_room(*args: Any) -> int:
        if total_of(smaller.files()) > 50:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(*args)

    monkeypatch.setattr(os, "pwrite", write_if_there_is_room)
    smaller.hold_bound()
    assert [file.name for file in smaller.files()] == ["page2"]
    assert int((tmp_path / ".prefix_store.lock").read_text()) == 30
