"""The host suite: what it times is a decode step as a GPU would get it."""

import io
import json
import subprocess
import sys

import pytest
from rich.console import Console

from hf_fp8kv.bench import host
from hf_fp8kv.utils.environment import make_environment


def test_a_stack_starts_the_kernels_of_a_step_and_no_others() -> None:
    """In a process of its own, where Triton is not the interpreter and has another driver."""
    program = """
import json, torch, triton
from hf_fp8kv.bench import host
from hf_fp8kv.ops.triton.target import Target, assuming, compiling
triton.runtime.driver.set_active(host.make_driver())
started = []
with torch.no_grad(), assuming(Target.parse(host.GPU)):
    stack = host.make_stack(2)
    with compiling(lambda kernel, grid, *_: started.append((kernel.__name__, grid))):
        stack.step()
    parts = host.measure_parts(stack)
print(json.dumps([started, parts, stack.cache.host_length()]))
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, env=make_environment())
    assert done.returncode == 0, done.stderr
    started, parts, length = json.loads(done.stdout)
    names = [name for name, _ in started]
    # The plan is the group's; each layer attends.
    assert (names.count("_plan"), names.count("_decode")) == (1, 2), names
    assert length == host.TOKENS + 1
    assert parts.keys() == host.PARTS.keys()
    assert all(value > 0 for value in parts.values()), parts


@pytest.mark.full
def test_the_suite_measures_in_a_process_of_its_own() -> None:
    told: list[str] = []
    result = host.run_host_suite(turns=2, progress=told.append)
    assert (result["suite"], len(told)) == ("host", 1)
    wholes = [row for row in result["rows"] if row["part"] == "all"]
    found = {(row["cache"], row["layers"]): row["value"] for row in wholes}
    assert found.keys() == {(host.PAGED, 1), (host.PAGED, 32), (host.STOCK, 32)}
    # What is done once per step is shared.
    assert found[host.PAGED, 1] > found[host.PAGED, 32] > 0
    for layers in host.LAYERS:
        rows = [
            row for row in result["rows"] if (row["cache"], row["layers"]) == (host.PAGED, layers)
        ]
        assert sum(row["value"] for row in rows[1:]) == pytest.approx(rows[0]["value"])
    console = Console(width=140, file=io.StringIO(), record=True)
    console.print(host.format_table(result))
    assert "launches of attend" in console.export_text()


def test_a_process_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "make_environment", lambda: {"PYTHONHOME": "/nowhere"})
    with pytest.raises(RuntimeError, match="a process ended with"):
        host.run_host_suite(turns=2)
