"""Determine which model types run in transformers' engine, with its cache and with our pages.

    python -m tests.tools.sweep_serving

A tiny random model of each type answers five prompts with `generate_batch`, in chunks. It first
runs with transformers' cache, and then with pages in the model's dtype, which round no values. The
answers of each run must equal the answers of `generate()`. The sweep takes about five minutes.
"""

import contextlib
import logging
import warnings
from collections import Counter
from typing import Any, NamedTuple

import torch
import transformers

from hf_fp8kv import FP8KVError, serving
from tests.helpers.serving_tools import generate_batch, greedy, prompts
from tests.helpers.tiny_models import build_variant, list_types

NEW_TOKENS = 6


class Comparison(NamedTuple):
    """Outcomes of a model type: "equal", "differs", "fails" or "refused"."""

    stock: str  # with transformers' cache
    paged: str  # with pages
    error: str = ""  # with pages


def main() -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    rows: dict[str, Comparison] = {}
    for name in list_types():
        if "/" not in name and (row := compare_caches(name)) is not None:
            rows[name] = row
            line = f"{name:24} transformers: {row.stock:8} pages: {row.paged:8} {row.error}"
            print(line, flush=True)
    print()
    outcome_counts = Counter((row.stock, row.paged) for row in rows.values())
    for (stock, paged), count in outcome_counts.most_common():
        print(f"{count:4}  transformers: {stock:8} pages: {paged}")


def compare_caches(name: str) -> Comparison | None:
    """Return the outcomes of a type, or None if the type does not run with `generate()`."""
    prompt_ids = prompts(90)[:5]
    try:
        model, _ = build_variant(name)
        expected = [generate_alone(model, ids) for ids in prompt_ids]
    except Exception:
        return None
    stock_outcome, _ = run_batched(model, prompt_ids, expected)
    try:
        serving.enable(model, dtype="auto")
    except FP8KVError as error:
        return Comparison(stock_outcome, "refused", str(error)[:160])
    return Comparison(stock_outcome, *run_batched(model, prompt_ids, expected))


def generate_alone(model: Any, ids: list[int]) -> list[int]:
    output = model.generate(
        torch.tensor([ids]), max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None,
        pad_token_id=0,
    )  # fmt: skip
    tokens: list[int] = output[0, len(ids) :].tolist()
    return tokens


def run_batched(
    model: Any, prompt_ids: list[list[int]], expected: list[list[int]]
) -> tuple[str, str]:
    """Return the outcome of `generate_batch`, and the error or ""."""
    try:
        with contextlib.redirect_stdout(None):
            outputs = generate_batch(
                model, prompt_ids, generation=greedy(max_new_tokens=NEW_TOKENS), max_batch_tokens=48
            )
    except Exception as error:
        return "fails", f"{type(error).__name__}: {error}"[:160].replace("\n", " ")
    return ("equal" if outputs == expected else "differs"), ""


if __name__ == "__main__":
    main()
