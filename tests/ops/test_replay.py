"""Calls that are replayed start what they would start the long way; the numbers are others' tests.

In a process of its own, where kernels are not those of the interpreter: see helpers/replays.py.
"""

import json
import os
import subprocess
import sys
from typing import Any

import torch

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
