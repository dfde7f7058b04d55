"""A calibration that is killed at random points, one run after another, and then left to end.

A process of its own, since it forks, which wants a process without threads:

    python -m tests.tools.killed FOLDER KILLS SEED TEXTS

prints the digest of the scales without and with interruptions, and what each killed run left done.
"""

import itertools
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
from safetensors import safe_open

from hf_fp8kv.calibration import calibrate
from tests.helpers.tiny_models import tiny

TEXTS = int(sys.argv[4])
# Every step takes three seconds, so that it is saved.
time.monotonic = itertools.count(0, 3).__next__


def digest(state: Path | None, chance: random.Random | None) -> str:
    """Return the digest of the scales. With `chance` the process ends within twelve model calls."""
    torch.set_num_threads(1)
    model = tiny("qwen2", key_bias=30.0)[0]
    seeded = torch.Generator().manual_seed(0)
    texts = [torch.randint(3, 99, (30,), generator=seeded) for _ in range(TEXTS)]
    if chance is not None:
        left = chance.randint(1, 12)

        def called(*_: object) -> None:
            nonlocal left
            left -= 1
            if not left:  # some microseconds later, wherever that is: in the model, or in a write
                signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-6, 5e-3))

        model.register_forward_pre_hook(called)
    scales = calibrate(
        model, texts, max_length=24, held_out=24 if TEXTS < 24 else 100, granularity="channel",
        state=state, progress=False,
    )  # fmt: skip
    return scales.digest


def main() -> None:
    folder, kills, chance = Path(sys.argv[1]), int(sys.argv[2]), random.Random(sys.argv[3])
    state, result = folder / "state", folder / "digest"
    assert _forked(None, result, None) == 0
    expected = result.read_text()
    result.unlink()
    left = []
    for _ in range(kills):
        # The default of this signal ends a process as SIGKILL does: nothing of Python runs.
        if _forked(state, result, random.Random(chance.random())) == 0:
            break
        left.append(_done(state))
    if not result.exists():
        assert _forked(state, result, None) == 0
    found = {"expected": expected, "found": result.read_text(), "left": left}
    files = sorted(path.name for path in folder.iterdir())
    sys.stdout.write(json.dumps(found | {"files": files}))


def _forked(state: Path | None, result: Path, chance: random.Random | None) -> int:
    child = os.fork()
    if child == 0:
        found = digest(state, chance)
        signal.setitimer(signal.ITIMER_REAL, 0)
        result.write_text(found)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert status in (0, signal.SIGALRM), status
    return status


def _done(state: Path) -> dict[str, int]:
    if not state.exists():
        return {}
    with safe_open(state, "pt") as file:
        return json.loads(file.metadata()["done"])["folds"]


if __name__ == "__main__":
    main()
