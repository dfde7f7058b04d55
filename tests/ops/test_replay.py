"""Calls that are replayed start what they would start the long way; other tests have the numbers.

The interpreter never replays: helpers/replays.py runs in a process without it.
"""

import json
import os
import subprocess
import sys

import pytest

from hf_fp8kv import ops


@pytest.mark.skipif(
    ops.available_backends()["triton"] is not None, reason=str(ops.available_backends()["triton"])
)
def test_a_replayed_call_starts_what_triton_would() -> None:
    """Also if one thing is changed that a call depends on: before the recording, and after it."""
    command = [sys.executable, "-m", "tests.helpers.replays"]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    compared = json.loads(done.stdout)
    assert compared.keys() == {"attend", "write", "make_plan"}
    assert sum(compared.values()) > 120, compared
