"""The first answer of a process that has just started, with pages of its prompt on disk.

Each process loads the model, calls `enable` and loads the CPU's kernels, which `enable` does by
itself with a store, beside hashing the weights. Then its first `generate` is timed: a prompt, one
token. A third of the processes have a `PrefixStore` that an earlier one filled, a third an empty
one, which shows what storing costs, and a third have none. They take turns, so that a busy machine
slows all alike.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hf_fp8kv.bench.reporting import build_table, quartiles
from hf_fp8kv.utils.environment import describe_run, make_environment

if TYPE_CHECKING:
    from rich.console import RenderableType

# How many times sooner the answer has to come.
TARGET = 5.0
STORES = ("none", "empty", "full")


def run_prefix_suite(
    *,
    model: str | None = None,
    tokens: int = 1500,
    rounds: int = 3,
    progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Time first answers without a store and with one, in turns, each in a process of its own.

    Args:
        model: a folder or a Hub id; None: the demo model.
        tokens: of the prefix; a question of about ten more follows, another one in each round.
        rounds: of one process without a store, one with an empty one and one with a full one.
        progress: called with the name of each thing measured.

    Returns:
        `suite`, `date`, `command`, `versions`, `hardware`, `settings`; `rows`, each with `store`
        (one of `STORES`), `seconds` (all), `median`, `low`, `high` (quartiles), `enable` (the
        median of what that took before), and `found`, tokens found in the store; `ratio`, of the
        medians without a store and with a full one; `difference`, the largest of a logit of these
        two in any round; `bytes` and `files` of the full store.

    Raises:
        RuntimeError: a process that measures ended early.
    """
    if model is None:
        from hf_fp8kv.utils.demo_model import model_path

        model = str(model_path())
    told: dict[str, list[dict[str, Any]]] = {kind: [] for kind in STORES}
    with tempfile.TemporaryDirectory() as folder:
        full = Path(folder) / "full"
        _ask(model, tokens, "What is this text about?", full)
        for number in range(rounds):
            question = f"In {number + 2} words, what is said of lists?"
            places = {"none": None, "empty": Path(folder) / f"empty-{number}", "full": full}
            turn = number % len(STORES)
            for kind in STORES[turn:] + STORES[:turn]:
                told[kind].append(_ask(model, tokens, question, places[kind]))
                if progress is not None:
                    progress(f"round {number + 1} of {rounds}, store: {kind}")
        files = list(full.glob("*.safetensors"))
        size = sum(file.stat().st_size for file in files)
    rows = []
    for kind in STORES:
        seconds = [answer["seconds"] for answer in told[kind]]
        median, low, high = quartiles(seconds)
        rows.append(
            {
                "store": kind, "seconds": seconds, "median": median, "low": low, "high": high,
                "found": min(answer["found"] for answer in told[kind]),
                "enable": quartiles([answer["enable"] for answer in told[kind]])[0],
            }
        )  # fmt: skip
    difference = max(
        (torch.tensor(one["logits"]) - torch.tensor(other["logits"])).abs().max().item()
        for one, other in zip(told["full"], told["none"], strict=True)
    )
    return {
        **describe_run("prefix"),
        "settings": {"model": model, "tokens": tokens, "rounds": rounds},
        "rows": rows,
        "ratio": rows[0]["median"] / rows[-1]["median"],
        "difference": difference,
        "bytes": size,
        "files": len(files),
    }


def format_table(result: dict[str, Any]) -> "RenderableType":
    """Return what `run_prefix_suite` measured as a table for a terminal."""
    columns = ("seconds", "quartiles", "enable before", "tokens found")
    return build_table(
        {"store": "left", **dict.fromkeys(columns, "right")},
        (
            (
                row["store"], f"{row['median']:.2f}",
                "-" if row["low"] is None else f"{row['low']:.2f} to {row['high']:.2f}",
                f"{row['enable']:.2f}", f"{row['found']:,}",
            )
            for row in result["rows"]
        ),
        title=f"First answer after a start, {result['settings']['tokens']:,} tokens of prefix",
        caption=f"{result['ratio']:.1f} times sooner (at least {TARGET:g}); logits differ by "
        f"{result['difference']:.2g} at most; "
        f"{result['files']} files, {result['bytes'] / 2**20:.1f} MiB. {result['date'][:10]}",
    )  # fmt: skip


def _ask(model: str, tokens: int, question: str, store: Path | None) -> dict[str, Any]:
    task = json.dumps(
        {
            "model": model, "tokens": tokens, "question": question,
            "store": None if store is None else str(store),
        }
    )  # fmt: skip
    command = [sys.executable, "-c", f"from {__name__} import _measure; _measure()", task]
    done = subprocess.run(command, capture_output=True, text=True, env=make_environment())
    if done.returncode:
        raise RuntimeError(
            f"the process that measures ended with {done.returncode}: {done.stderr[-2000:]}"
        )
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def _measure() -> None:
    """Print the time of the first answer to the task that is the last argument of the process."""
    import pydoc_data.topics

    from transformers import AutoModelForCausalLM, AutoTokenizer

    from hf_fp8kv.attention.enable import enable
    from hf_fp8kv.cache.prefix_store import PrefixStore
    from hf_fp8kv.ops import choose_backend, prepare_backend

    task = json.loads(sys.argv[-1])
    tokenizer = AutoTokenizer.from_pretrained(task["model"])
    model: Any = AutoModelForCausalLM.from_pretrained(task["model"], dtype=torch.float32)
    text = "\n".join(pydoc_data.topics.topics[name] for name in ("typesseq", "lists", "strings"))
    prefix = tokenizer(text, return_tensors="pt").input_ids[:, : task["tokens"]]
    question = tokenizer(task["question"], return_tensors="pt").input_ids
    ids = torch.cat([prefix, question], 1)
    start = time.perf_counter()
    store = None if task["store"] is None else PrefixStore(task["store"])
    enable(model, prefill="stored", prefix_store=store)
    prepare_backend(choose_backend("auto", model.device))
    enabled = time.perf_counter()
    said = model.generate(
        ids, max_new_tokens=1, do_sample=False, output_logits=True, return_dict_in_generate=True
    )
    answer = {
        "seconds": time.perf_counter() - enabled,
        "enable": enabled - start,
        "found": 0 if store is None else store.usage().tokens_found,
        "logits": said.logits[0][0].tolist(),
    }
    sys.stdout.write(json.dumps(answer) + "\n")
