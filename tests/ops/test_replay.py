"""Calls that are replayed start what they would start the long way; the numbers are others' tests.

In a process of its own, where kernels are not those of the interpreter: see helpers/replays.py.
"""

import json
import os
import pickle
import subprocess
import sys
from copy import deepcopy
from typing import Any

import torch

from hf_fp8kv import ops
from hf_fp8kv.ops import AttentionSpec, Pages, StoredSide, direct
from hf_fp8kv.ops.triton import backend, replay
from hf_fp8kv.ops.triton.plan import max_parts


def run(*arguments: str) -> Any:
    """Return what a module of the helpers writes."""
    command = [sys.executable, "-m", *arguments]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


def test_a_replayed_call_starts_what_triton_would() -> None:
    """Random calls, some of which differ in one thing."""
    replayed = run("tests.helpers.replays", "600", "0")
    assert min(replayed.values()) > 50, replayed


def test_what_a_recording_is_not_taken_for() -> None:
    """Each thing that a call depends on, changed alone: before the recording, and after it."""
    assert run("tests.helpers.replay_changes") > 100


def test_the_interpreter_runs_each_call() -> None:
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    calls = []
    for _ in range(3):
        replay.run_or_replay(
            lambda: calls.append(1), (), (), (torch.zeros(1),), (0,) * len(replay.NUMBERS), ()
        )
    assert len(calls) == 3


def test_calls_by_a_plan_share_their_room() -> None:
    """It stays as long as the plan: a CUDA graph knows its address. Each shape has its own."""
    plan, heads = torch.zeros(50, 4, dtype=torch.int32), 2

    def find_room(tokens: int, dim: int = 16) -> Any:
        query = torch.zeros(1, 4, tokens, 32)
        return backend._describe_plan(plan, query, heads, dim)[0]

    rooms = [find_room(tokens) for tokens in (1, 2, 1)]
    parts = max_parts(plan, 1, heads)
    assert rooms[0] is rooms[2] is find_room(1)
    assert [len(room.sums) for room in rooms[:2]] == [parts * 4 * 16, parts * 8 * 16]
    assert [len(room.stats) for room in rooms[:2]] == [parts * 4 * 2, parts * 8 * 2]
    assert len(find_room(1, 64).sums) == parts * 4 * 64
    assert find_room(20) is None, "of many rows"


def test_operations_of_the_dispatcher_keep_nothing_with_a_plan(monkeypatch):
    """Its own memory must not outlive a call in the CUDA graphs of torch.compile."""
    plan, seen = torch.zeros(50, 4, dtype=torch.int32), []
    pages, lengths = make_pages(), torch.ones(1, dtype=torch.int32)
    x, spec = torch.zeros(1, 2, 1, 16), AttentionSpec(1.0, True)

    def note(*args: Any) -> torch.Tensor:
        seen.append(next(a for a in args if isinstance(a, torch.Tensor) and a.shape == plan.shape))
        return torch.zeros(1, 1, 2, 16)

    monkeypatch.setattr(direct, "attend", note)
    monkeypatch.setattr(direct, "write_and_attend", note)
    for observed in (False, True):
        with torch.set_grad_enabled(observed):
            ops.attend(x, pages, lengths, 0, 1, spec, plan=plan, backend="triton")
            ops.write_and_attend(x, x, x, pages, lengths, 0, 1, spec, plan=plan, backend="triton")
    assert [a is plan for a in seen] == [True, True, False, False]
    assert all(a.data_ptr() == plan.data_ptr() for a in seen)


def test_copies_know_their_own_addresses():
    plan, pages = torch.zeros(50, 4, dtype=torch.int32), make_pages()
    query = torch.zeros(1, 2, 1, 16)
    backend._describe(pages)
    backend._describe_plan(plan, query, 2, 16)
    for copy in (deepcopy, lambda x: pickle.loads(pickle.dumps(x))):
        assert backend._describe(copy(pages)).addresses[0] != pages.k.codes.data_ptr()
        assert backend._describe_plan(copy(plan), query, 2, 16)[1].addresses[0] != plan.data_ptr()


def make_pages() -> Pages:
    side = StoredSide(torch.zeros(2, 2, 16, 16), None, None, "auto", 16)
    return Pages(side, side, None, torch.zeros(1, 1, dtype=torch.int32))
