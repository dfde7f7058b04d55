"""Time the first answer of a new process that finds pages of its prompt in a `PrefixStore`.

Each process loads the model, calls `enable` and loads the CPU's kernels. Then its first `generate`
is timed, which computes a prompt and one token. A third of the processes have a store that an
earlier process filled. A third have an empty store, which shows the cost of storing. The remaining
processes have no store. The three kinds alternate, so a busy machine slows all of them down.
"""

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hf_fp8kv.bench.reporting import compute_quartiles
from hf_fp8kv.utils.demo_model import demo_model_path
from hf_fp8kv.utils.environment import describe_run

from .shared import MODEL_OPTIONS, Options, Result, main, make_environment, run_process

STORE_KINDS = ("none", "empty", "full")


def measure_prefix(
    *,
    model: str | None = None,
    prefix_tokens: int = 1500,
    rounds: int = 3,
    progress: Callable[[str], None],
) -> Result:
    """Time first answers without a store and with a store, each in a separate process.

    Args:
        model: A folder or a Hub id. None means the demo model.
        prefix_tokens: Number of tokens of the prefix. A question of about ten tokens follows.
        rounds: Number of processes without a store, with an empty store and with a full store.
        progress: Function that is called with the name of each measurement.

    Returns:
        The entries of `describe_run`, `settings`, and `rows` with `store` (one of `STORE_KINDS`),
        `seconds` (of each answer), `median`, `low`, `high`, `enable` (seconds of that call) and
        `found` (tokens from the store). `ratio` is the median without a store over the median with
        a full store, and `difference` the largest difference of their logits. `bytes` and `files`
        are sizes of the full store.

    Raises:
        RuntimeError: A process failed.
    """
    run = describe_run("prefix")
    model_path = model or str(demo_model_path())
    environment = make_environment()
    answers: dict[str, list[dict[str, Any]]] = {kind: [] for kind in STORE_KINDS}

    def measure_answer(question: str, store: Path | None) -> dict[str, Any]:
        task = {
            "model": model_path, "prefix_tokens": prefix_tokens, "question": question,
            "store": store and str(store),
        }  # fmt: skip
        answer: dict[str, Any] = run_process("benchmarks.prefix:_write_answer", task, environment)
        return answer

    with tempfile.TemporaryDirectory() as folder:
        full_store = Path(folder) / "full"
        measure_answer("What is this text about?", full_store)
        for index in range(rounds):
            stores = {"none": None, "empty": Path(folder) / f"empty-{index}", "full": full_store}
            first_kind = index % len(STORE_KINDS)
            for kind in STORE_KINDS[first_kind:] + STORE_KINDS[:first_kind]:
                progress(f"round {index + 1} of {rounds}, store: {kind}")
                question = f"In {index + 2} words, what is said of lists?"
                answers[kind].append(measure_answer(question, stores[kind]))
        file_sizes = [file.stat().st_size for file in full_store.glob("*.safetensors")]
    rows = []
    medians: dict[str, float] = {}
    for kind, kind_answers in answers.items():
        seconds = [answer["seconds"] for answer in kind_answers]
        medians[kind], low, high = compute_quartiles(seconds)
        rows.append({
            "store": kind, "seconds": seconds, "median": medians[kind], "low": low, "high": high,
            "found": min(answer["found"] for answer in kind_answers),
            "enable": statistics.median(answer["enable"] for answer in kind_answers),
        })  # fmt: skip
    difference = max(
        (torch.tensor(restored["logits"]) - torch.tensor(computed["logits"])).abs().max().item()
        for restored, computed in zip(answers["full"], answers["none"], strict=True)
    )
    settings = {"model": model_path, "tokens": prefix_tokens, "rounds": rounds}
    return {
        **run, "settings": settings, "rows": rows, "ratio": medians["none"] / medians["full"],
        "difference": difference, "bytes": sum(file_sizes), "files": len(file_sizes),
    }  # fmt: skip


def _write_answer(task: dict[str, Any]) -> None:
    """Generate the first answer, and write its times and logits to stdout, as JSON."""
    import pydoc_data.topics

    from transformers import AutoModelForCausalLM, AutoTokenizer

    from hf_fp8kv.enabling import enable
    from hf_fp8kv.ops import choose_backend, load_backend
    from hf_fp8kv.prefix.store import PrefixStore

    tokenizer = AutoTokenizer.from_pretrained(task["model"])
    model: Any = AutoModelForCausalLM.from_pretrained(task["model"], dtype=torch.float32)
    text = "\n".join(pydoc_data.topics.topics[name] for name in ("typesseq", "lists", "strings"))
    prefix = tokenizer(text, return_tensors="pt").input_ids[:, : task["prefix_tokens"]]
    question = tokenizer(task["question"], return_tensors="pt").input_ids
    ids = torch.cat([prefix, question], 1)
    start = time.perf_counter()
    store = None if task["store"] is None else PrefixStore(task["store"])
    enable(model, prefill="stored", prefix_store=store)
    load_backend(choose_backend("auto", model.device))
    enable_end = time.perf_counter()
    generated = model.generate(
        ids, max_new_tokens=1, do_sample=False, output_logits=True, return_dict_in_generate=True
    )
    answer = {
        "seconds": time.perf_counter() - enable_end,
        "enable": enable_end - start,
        "found": 0 if store is None else store.usage().tokens_found,
        "logits": generated.logits[0][0].tolist(),
    }
    sys.stdout.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    options: Options = {
        "--model": MODEL_OPTIONS["--model"],
        "--tokens": {"type": int, "dest": "prefix_tokens", "help": "Tokens of the prefix."},
        "--rounds": {"type": int, "help": "Number of processes of each kind."},
    }
    main(__doc__, measure_prefix, options)
