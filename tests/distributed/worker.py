"""Run all cases of the distributed tests in two processes, each with its part of the models.

    python tests/distributed/worker.py FOLDER

FOLDER contains the models. The results are written to FOLDER/rank0.json and FOLDER/rank1.json. The
processes are forked after the imports, and have the environment variables that torchrun sets.
"""

import gc
import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing import start_processes
from transformers.distributed import DistributedConfig

import hf_fp8kv
from tests.distributed import cases

NUM_PROCESSES = 2


def run_cases(rank: int, folder: Path) -> None:
    """Run all cases as the rank of this process, and write their results."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    models: dict[str, Any] = {}
    results: dict[str, Any] = {}
    for name, (model_name, run) in cases.CASES.items():
        # If a case hangs or fails, the log shows its name.
        sys.stdout.write(f"rank {rank}: {name}\n")
        sys.stdout.flush()
        if model_name not in models:
            config = DistributedConfig(tp_plan="auto")
            models[model_name] = cases.load_model(folder, model_name, distributed_config=config)
        model = models[model_name]
        model.set_attn_implementation("fp8_paged")
        cache_options: Any = {}
        if name != "uneven heads":  # this case tests the error for a model that cannot be split
            cache_options["tensor_parallel"] = hf_fp8kv.tensor_parallel(model)
        results[name] = run(model, cache_options, folder)
    (folder / f"rank{rank}.json").write_text(json.dumps(results))
    torch.distributed.destroy_process_group()
    os._exit(0)  # a normal exit waits for threads, and sometimes aborts


def fork_processes(folder: Path) -> None:
    """Run `run_cases` in two processes. If a process fails, raise its error and end both."""
    with socket.socket() as port_probe:
        port_probe.bind(("127.0.0.1", 0))
        port = port_probe.getsockname()[1]
    # Without this call, half of the run time is garbage collection of imported objects.
    gc.freeze()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE=str(NUM_PROCESSES))
    start_processes(run_cases, (folder,), nprocs=NUM_PROCESSES, start_method="fork")


if __name__ == "__main__":
    fork_processes(Path(sys.argv[1]))
