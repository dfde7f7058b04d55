"""Test a `PrefixStore` that processes share. Some processes are killed while they write.

    python -m tests.tools.store_kills --kills 200

The parent process builds a tiny model. It forks each writer, which answers prompts in a random
order until it is killed at a random moment. After each kill, a new store reads the folder. The
answers must equal the answers without a store, and the total size of all files, including
unfinished files, must be within the bound.
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
NUM_PROMPTS, PROMPT_TOKENS, PAGE_SIZE = 6, 100, 8  # PAGE_SIZE in tokens
# About half of the pages of six prompts fit, because each prompt has 12 pages.
MAX_BYTES = 36 * 2300


def run_kills(folder: Path, kills: int) -> dict[str, int]:
    """Run `kill_writers` in a separate process, because it forks, and callers may have threads."""
    return _run_module("--kills", str(kills), "--folder", str(folder))


def run_together(folder: Path, processes: int) -> dict[str, int]:
    """Run `write_together` in a separate process. The writers use the same prompts."""
    return _run_module("--together", str(processes), "--folder", str(folder))


def _run_module(*arguments: str) -> dict[str, int]:
    command = [sys.executable, "-m", "tests.tools.store_kills", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    process = subprocess.run(
        command, env=environment, cwd=Path(__file__).parents[2], capture_output=True, text=True
    )
    assert not process.returncode, process.stderr[-3000:]
    result: dict[str, int] = json.loads(process.stdout.splitlines()[-1])
    return result


class Workload:
    """A tiny model, prompts, and the model's answers without a store."""

    def __init__(self, folder: Path) -> None:
        import torch

        from hf_fp8kv import FP8PagedCache, PrefixStore, enable
        from tests.helpers.tiny_models import tiny

        torch.set_num_threads(1)
        self.model, _ = tiny("sliding_and_full", max_position_embeddings=512)
        self.folder, self.enable, self.store_class = folder, enable, PrefixStore
        generator = torch.Generator().manual_seed(0)
        self.prompts = torch.randint(2, 98, (NUM_PROMPTS, 1, PROMPT_TOKENS), generator=generator)
        enable(self.model, prefill="stored", page_size=PAGE_SIZE)
        self.expected = []
        for prompt in self.prompts:
            cache = FP8PagedCache(self.model.config, prefill="stored", page_size=PAGE_SIZE)
            self.expected.append(self.model.generate(prompt, past_key_values=cache, **GREEDY))

    def answer_prompts(self, rounds: int, seed: int) -> dict[str, int]:
        """Answer random prompts. Return the counts of wrong answers and of the store."""
        import torch

        store = self.store_class(self.folder, max_bytes=MAX_BYTES)
        self.enable(self.model, prefix_store=store, page_size=PAGE_SIZE)
        generator, num_wrong = random.Random(seed), 0
        for _ in range(rounds):
            index = generator.randrange(NUM_PROMPTS)
            answer = self.model.generate(self.prompts[index], **GREEDY)
            num_wrong += not torch.equal(answer, self.expected[index])
        usage = store.usage()
        return {
            "wrong": num_wrong, "found": usage.tokens_found, "written": usage.bytes_written,
            "over": int(self.count_bytes() > MAX_BYTES), "refused": usage.files_refused,
        }  # fmt: skip

    def count_bytes(self) -> int:
        total = 0
        for path in self.folder.iterdir():
            try:
                total += path.lstat().st_size
            except FileNotFoundError:
                continue  # another process has removed the file
        return total

    def fork_writer(self, rounds: int, seed: int, result_path: Path | None = None) -> int:
        """Answer prompts in a child process, which writes its counts to a file. Return its ID."""
        pid = os.fork()
        if pid:
            return pid
        try:
            counts = self.answer_prompts(rounds, seed)
            if result_path is not None:
                result_path.write_text(json.dumps(counts))
        finally:
            os._exit(0)


def kill_writers(workload: Workload, num_kills: int) -> dict[str, int]:
    """Kill `num_kills` writers at random moments. Return the summed counts of all reads."""
    start = time.monotonic()
    workload.answer_prompts(NUM_PROMPTS, 0)
    duration = time.monotonic() - start
    totals = {"kills": 0, "wrong": 0, "over": 0, "written": 0, "found": 0, "refused": 0, "parts": 0}
    generator = random.Random(1)
    for seed in range(num_kills):
        for path in list(workload.folder.glob("*.safetensors"))[:: generator.randint(1, 3)]:
            path.unlink()  # so that the writer has pages to write
        pid = workload.fork_writer(1000, seed=seed)
        time.sleep(generator.uniform(0, duration))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        totals["kills"] += 1
        totals["parts"] += len(list(workload.folder.glob(".*.part")))
        totals["over"] += workload.count_bytes() > MAX_BYTES
        for name, value in workload.answer_prompts(3, seed=seed).items():
            totals[name] += value
    return totals


def write_together(workload: Workload, num_processes: int) -> dict[str, int]:
    """Run processes that answer prompts at the same time. Return their summed counts."""
    result_paths = [workload.folder.with_name(f"result{index}") for index in range(num_processes)]
    pids = [workload.fork_writer(30, index, path) for index, path in enumerate(result_paths)]
    totals = {"wrong": 0, "over": 0, "written": 0, "found": 0, "refused": 0}
    while pids:
        totals["over"] += workload.count_bytes() > MAX_BYTES
        pid, _ = os.waitpid(pids[0], os.WNOHANG)
        if pid:
            pids.pop(0)
        time.sleep(0.005)
    for path in result_paths:
        for name, value in json.loads(path.read_text()).items():
            totals[name] += value
    return totals


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=0, help="number of writers to kill")
    parser.add_argument("--together", type=int, default=0, help="processes to run without kills")
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
