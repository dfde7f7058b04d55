"""Program of the distributed tests: two processes run all cases on their parts of the models.

    python tests/distributed/worker.py FOLDER

FOLDER holds the models. Results are in FOLDER/rank0.json and so on. The processes are forked after
the imports, with the variables that torchrun sets, so that the imports run once.
"""

import gc
import json
import os
import signal
import socket
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
from transformers.distributed import DistributedConfig

import hf_fp8kv
from tests.distributed import cases

PROCESSES = 2


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    rank = os.environ["RANK"]
    models: dict[str, Any] = {}
    results: dict[str, Any] = {}
    for name, (model_name, run) in cases.CASES.items():
        # The log of a run that hangs shows the case.
        sys.stdout.write(f"rank {rank}: {name}\n")
        sys.stdout.flush()
        if model_name not in models:
            split = DistributedConfig(tp_plan="auto")
            models[model_name] = cases.load(folder, model_name, distributed_config=split)
        model = models[model_name]
        model.set_attn_implementation("fp8_paged")
        ranks: Any = {}
        if name != "uneven heads":
            ranks["tensor_parallel"] = hf_fp8kv.tensor_parallel(model)
        try:
            results[name] = {"result": run(model, ranks, folder)}
        except Exception:
            # The other process may wait for this process, so the parent kills both.
            sys.stdout.write(f"rank {rank}: {name}: {traceback.format_exc()}\n")
            raise
    (folder / f"rank{rank}.json").write_text(json.dumps(results))
    torch.distributed.destroy_process_group()


def fork(folder: Path) -> int:
    """Run `main` in two processes. Return 0, or kill both and return 1 as soon as one fails."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # Otherwise, half of the run time is garbage collection of imported objects.
    gc.freeze()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE=str(PROCESSES))
    children = []
    for rank in range(PROCESSES):
        child = os.fork()
        if child == 0:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
            try:
                main(folder)
            except BaseException:
                os._exit(1)
            finally:
                sys.stdout.flush()
            os._exit(0)
        children.append(child)
    while children:
        child, status = os.wait()
        children.remove(child)
        if status != 0:
            for remaining in children:
                os.kill(remaining, signal.SIGKILL)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(fork(Path(sys.argv[1])))
