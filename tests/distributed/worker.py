"""One of the processes that torchrun starts: runs every case on its part of the models.

    torchrun --nproc_per_node 2 tests/distributed/worker.py FOLDER

FOLDER holds the models; results go to FOLDER/rank0.json and so on.
"""

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
from transformers.distributed import DistributedConfig

import hf_fp8kv
from tests.distributed import cases


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    rank = os.environ["RANK"]
    models: dict[str, Any] = {}
    found: dict[str, Any] = {}
    for name, (model_name, run) in cases.CASES.items():
        # Whoever reads the log of a run that hangs sees where.
        sys.stdout.write(f"rank {rank}: {name}\n")
        sys.stdout.flush()
        if model_name not in models:
            split = DistributedConfig(tp_plan="auto")
            models[model_name] = cases.load(folder, model_name, distributed_config=split)
        model = models[model_name]
        model.set_attn_implementation("fp8_paged")
        ranks = {} if name == "uneven heads" else dict(hf_fp8kv.tensor_parallel(model))
        try:
            found[name] = {"found": run(model, ranks, folder)}
        except Exception:
            # The other process may wait for this one now: torchrun ends both.
            sys.stdout.write(f"rank {rank}: {name}: {traceback.format_exc()}\n")
            raise
    (folder / f"rank{rank}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
