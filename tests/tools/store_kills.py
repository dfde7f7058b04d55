"""Test a `PrefixStore` that processes share and that are killed while they write.

    python -m tests.tools.store_kills --kills 200

The parent builds a tiny model. It forks each writer, which answers prompts in a random order until
it is killed at a random moment. After each kill, another store reads the folder: the tokens must
equal the tokens without a store, and all files, including unfinished files, must be within the
bound.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

GREEDY = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "suppress_tokens": [0]}
PROMPTS, TOKENS, PAGE = 6, 100, 8
# About half of the pages of six prompts fit. A prompt has 12 pages.
BOUND = 36 * 2300


def run_kills(folder: Path, kills: int) -> dict[str, int]:
    """Run this file in a separate process, because it forks and the caller may have threads."""
    return _run("--kills", str(kills), "--folder", str(folder))


def run_together(folder: Path, processes: int) -> dict[str, int]:
    """Run processes that write and read the same prompts at the same time."""
    return _run("--together", str(processes), "--folder", str(folder))


def _run(*arguments: str) -> dict[str, int]:
    command = [sys.executable, "-m", "tests.tools.store_kills", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    process = subprocess.run(
        command, env=environment, cwd=Path(__file__).parents[2], capture_output=True, text=True
    )
    assert not process.returncode, process.stderr[-3000:]
    result: dict[str, int] = json.loads(process.stdout.splitlines()[-1])
    return result


class Workload:
    """A tiny model, prompts, and its answers without a store."""

    def __init__(self, folder: Path) -> None:
        import torch

        from hf_fp8kv import FP8PagedCache, PrefixStore, enable
        from tests.helpers.tiny_models import tiny

        torch.set_num_threads(1)
        self.model, _ = tiny("sliding_and_full", max_position_embeddings=512)
        self.folder, self.enable, self.store_class = folder, enable, PrefixStore
        generator = torch.Generator().manual_seed(0)
        self.prompts = torch.randint(2, 98, (PROMPTS, 1, TOKENS), generator=generator)
        enable(self.model, prefill="stored", page_size=PAGE)
        self.expected = []
        for prompt in self.prompts:
            cache = FP8PagedCache(self.model.config, prefill="stored", page_size=PAGE)
            self.expected.append(self.model.generate(prompt, past_key_values=cache, **GREEDY))

    def answer(self, rounds: int, seed: int) -> dict[str, int]:
        """Answer random prompts. Return the number of wrong answers and the counts of the store."""
        import torch

        store = self.store_class(self.folder, max_bytes=BOUND)
        self.enable(self.model, prefix_store=store, page_size=PAGE)
        generator, num_wrong = random.Random(seed), 0
        for _ in range(rounds):
            index = generator.randrange(PROMPTS)
            answer = self.model.generate(self.prompts[index], **GREEDY)
            num_wrong += not torch.equal(answer, self.expected[index])
        usage = store.usage()
        return {
            "wrong": num_wrong, "found": usage.tokens_found, "written": usage.bytes_written,
            "over": int(self.size() > BOUND), "refused": usage.files_refused,
        }  # fmt: skip

    def size(self) -> int:
        total = 0
        for path in self.folder.iterdir():
            try:
                total += path.lstat().st_size
            except FileNotFoundError:
                continue  # another process removed it
        return total

    def fork(self, rounds: int, seed: int, result: Path | None = None) -> int:
        """Answer prompts in a child process, and return its id."""
        child = os.fork()
        if child:
            return child
        try:
            counts = self.answer(rounds, seed)
            if result is not None:
                result.write_text(json.dumps(counts))
        finally:
            os._exit(0)


def kill_writers(workload: Workload, kills: int) -> dict[str, int]:
    """Kill a writing process `kills` times at random moments. Return the counts of all reads."""
    start = time.monotonic()
    workload.answer(PROMPTS, 0)
    duration = time.monotonic() - start
    totals = {"kills": 0, "wrong": 0, "over": 0, "written": 0, "found": 0, "refused": 0, "parts": 0}
    generator = random.Random(1)
    for number in range(kills):
        for path in list(workload.folder.glob("*.safetensors"))[:: generator.randint(1, 3)]:
            path.unlink()  # the writer then has pages to write
        child = workload.fork(1000, seed=number)
        time.sleep(generator.uniform(0, duration))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        totals["kills"] += 1
        totals["parts"] += len(list(workload.folder.glob(".*.part")))
        totals["over"] += workload.size() > BOUND
        for name, value in workload.answer(3, seed=number).items():
            totals[name] += value
    return totals


def write_together(workload: Workload, processes: int) -> dict[str, int]:
    """Run processes that answer prompts at the same time. Return their summed counts."""
    results = [workload.folder.with_name(f"result{number}") for number in range(processes)]
    children = [workload.fork(30, number, result) for number, result in enumerate(results)]
    totals = {"wrong": 0, "over": 0, "written": 0, "found": 0, "refused": 0}
    while children:
        totals["over"] += workload.size() > BOUND
        child, _ = os.waitpid(children[0], os.WNOHANG)
        if child:
            children.pop(0)
        time.sleep(0.005)
    for result in results:
        for name, value in json.loads(result.read_text()).items():
            totals[name] += value
    return totals


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--together", type=int, default=0, help="processes that are not killed")
    parser.add_argument("--folder", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = (args.folder or Path(scratch)) / "store"
        folder.mkdir(parents=True, exist_ok=True)
        workload: Any = Workload(folder)
        totals = write_together(workload, args.together) if args.together else None
        sys.stdout.write(json.dumps(totals or kill_writers(workload, args.kills)) + "\n")


if __name__ == "__main__":
    main()
