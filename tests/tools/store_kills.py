"""Test a `PrefixStore` that several processes share, even if they are killed while they write.

    python -m tests.tools.store_kills --kills 200

The parent process builds a tiny model. It forks pairs of writers, which answer prompts in a random
order at the same time. One writer is killed at a random moment. Afterwards, a new store reads the
folder. The answers must equal the answers without a store, and the total size of all files,
including partial files, must be at most `MAX_BYTES`. The program prints these counts as JSON:

* wrong_answers: number of answers that differ from the answers without a store
* tokens_found, bytes_written: sums of the fields of `PrefixStore.usage()`
* over_limit: number of times at which the files had more than `MAX_BYTES`
* kills, partial_files: number of kills, and of partial files after them
"""

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

GREEDY = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "suppress_tokens": [0]}
NUM_PROMPTS = 6
PROMPT_TOKENS = 100
PAGE_SIZE = 8  # in tokens
# Half of the 6 x 12 pages of all prompts fit. The file of a page has about 2,300 bytes.
MAX_BYTES = 36 * 2300


def run_killed_writers(num_kills: int) -> dict[str, int]:
    """Run `kill_writers` in a separate process, because it forks, and callers may have threads."""
    command = [sys.executable, "-m", "tests.tools.store_kills", "--kills", str(num_kills)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    process = subprocess.run(
        command, env=environment, cwd=Path(__file__).parents[2], capture_output=True, text=True
    )
    assert not process.returncode, process.stderr[-3000:]
    counts: dict[str, int] = json.loads(process.stdout.splitlines()[-1])
    return counts


class Workload:
    """A tiny model, prompts, and the model's answers without a store."""

    def __init__(self, folder: Path) -> None:
        import torch

        from hf_fp8kv import FP8PagedCache
        from tests.helpers.tiny_models import build_variant

        torch.set_num_threads(1)
        self.folder = folder
        self.model: Any = build_variant(
            "sliding_and_full", attn_implementation="fp8_paged", max_position_embeddings=512
        )[0]
        generator = torch.Generator().manual_seed(0)
        self.prompts = torch.randint(2, 98, (NUM_PROMPTS, 1, PROMPT_TOKENS), generator=generator)
        self.expected_answers = []
        for prompt in self.prompts:
            cache = FP8PagedCache(self.model.config, prefill="stored", page_size=PAGE_SIZE)
            answer = self.model.generate(prompt, past_key_values=cache, **GREEDY)
            self.expected_answers.append(answer.tolist())

    def answer_prompts(self, num_answers: int, seed: int) -> dict[str, int]:
        from hf_fp8kv import PrefixStore, enable

        store = PrefixStore(self.folder, max_bytes=MAX_BYTES)
        enable(self.model, prefix_store=store, page_size=PAGE_SIZE)
        rng = random.Random(seed)
        num_wrong = 0
        for _ in range(num_answers):
            index = rng.randrange(NUM_PROMPTS)
            answer = self.model.generate(self.prompts[index], **GREEDY)
            if answer.tolist() != self.expected_answers[index]:
                num_wrong += 1
        usage = store.usage()
        return {
            "wrong_answers": num_wrong, "tokens_found": usage.tokens_found,
            "bytes_written": usage.bytes_written, "over_limit": int(self.is_over_limit()),
        }  # fmt: skip

    def is_over_limit(self) -> bool:
        """Return whether all files, except the plan in the folder "plans", have too many bytes."""
        total = 0
        for path in self.folder.glob("*.*"):
            with contextlib.suppress(FileNotFoundError):  # removed by another process
                total += path.lstat().st_size
        return total > MAX_BYTES

    def fork_writer(self, num_answers: int, seed: int, result_path: Path) -> int:
        """Answer prompts in a child process, which writes its counts to a file. Return its pid."""
        pid = os.fork()
        if pid == 0:
            try:
                result_path.write_text(json.dumps(self.answer_prompts(num_answers, seed)))
            finally:
                os._exit(0)
        return pid


def kill_writers(workload: Workload, num_kills: int) -> dict[str, int]:
    """Kill one of two writers `num_kills` times. Return the summed counts of all other stores."""
    start = time.monotonic()
    workload.answer_prompts(NUM_PROMPTS, 0)
    max_seconds = time.monotonic() - start
    result_path = workload.folder.with_name("result")
    totals = Counter(kills=num_kills)
    rng = random.Random(1)
    for seed in range(num_kills):
        for path in list(workload.folder.glob("*.safetensors"))[:: rng.randint(1, 3)]:
            path.unlink()  # so that the writers have pages to write
        killed_pid = workload.fork_writer(1000, seed, result_path)
        other_pid = workload.fork_writer(3, seed + 1, result_path)
        time.sleep(rng.uniform(0, max_seconds))
        os.kill(killed_pid, signal.SIGKILL)
        os.waitpid(killed_pid, 0)
        totals["partial_files"] += len(list(workload.folder.glob(".*.part")))
        if workload.is_over_limit():
            totals["over_limit"] += 1
        os.waitpid(other_pid, 0)
        totals.update(json.loads(result_path.read_text()))
        totals.update(workload.answer_prompts(3, seed))
    return totals


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=10, help="number of writers to kill")
    with tempfile.TemporaryDirectory() as parent_folder:
        store_folder = Path(parent_folder, "store")
        store_folder.mkdir()
        counts = kill_writers(Workload(store_folder), parser.parse_args().kills)
        sys.stdout.write(json.dumps(counts) + "\n")
