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
from typing import Any

import torch
import transformers

from hf_fp8kv import FP8KVError, serving
from tests.helpers.serving_tools import draw_prompts, generate_batch, make_greedy_config
from tests.helpers.tiny_models import build_variant, list_types

NEW_TOKENS = 6
PROMPTS = draw_prompts(90)[:5]


def generate_alone(model: Any, ids: list[int]) -> list[int]:
    output = model.generate(
        torch.tensor([ids]), max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None,
        pad_token_id=0,
    )  # fmt: skip
    return output[0, len(ids) :].tolist()


def run_batched(model: Any, expected: list[list[int]]) -> str:
    """Return the outcome of `generate_batch`: "equal", "differs" or the error."""
    try:
        with contextlib.redirect_stdout(None):
            outputs = generate_batch(
                model,
                PROMPTS,
                generation=make_greedy_config(max_new_tokens=NEW_TOKENS),
                max_batch_tokens=48,
            )
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:160].replace("\n", " ")
    return "equal" if outputs == expected else "differs"


def main() -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    counts = Counter[tuple[bool, bool]]()
    for name in list_types():
        try:
            model, _ = build_variant(name)
            expected = [generate_alone(model, ids) for ids in PROMPTS]
        except Exception:
            continue  # the type does not run with `generate()`
        stock = run_batched(model, expected)
        try:
            serving.enable(model, dtype="auto")
            paged = run_batched(model, expected)
        except FP8KVError as error:
            paged = f"refused: {error}"[:160]
        print(f"{name:24} transformers: {stock}, pages: {paged}", flush=True)
        counts[stock == "equal", paged == "equal"] += 1
    print("equal with transformers' cache and with pages:", dict(counts))


if __name__ == "__main__":
    main()
