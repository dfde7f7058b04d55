"""Determine which model types of transformers run with `FP8PagedCache`, and write a table.

    python -m tests.tools.sweep [--types llama,t5] [--out docs/architectures.md]

Each type is a tiny random model (`tests/helpers/tiny_models.py`) that generates eight tokens
greedily, for a batch of two with padding. Every answer is compared with the answer of transformers'
`DynamicCache`. `dtype="auto"` must give the same tokens, under the model's own attention and under
"fp8_paged".
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import platform
import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from transformers import AttentionInterface, DynamicCache, EncoderDecoderCache, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_fp8kv import FP8KVError, FP8PagedCache, enable
from hf_fp8kv.attention.latent import reads_stored_latents
from hf_fp8kv.cache.paged_tensor import PagedKV
from hf_fp8kv.utils.environment import describe_hardware
from tests.helpers.recorded_graph import recorded_graphs
from tests.helpers.tiny_models import NEW_TOKENS, Inputs, build_model, list_types

FP8_PAGED = "fp8_paged"
FP8 = "fp8_e4m3"
# Tolerance for a different order of sums in fp32, as a share of the logits' standard deviation.
TOLERANCE = 1e-3
CAPTURED_TOKENS = 20  # number of tokens of a call with captured steps
# From the worst to the best. "close" means equal tokens, but logits that differ by more than
# rounding. "refused" means an error of this package.
STATUSES = ("error", "refused", "differs", "close", "equal")


class Answer(NamedTuple):
    """Tokens `[B, NEW_TOKENS]` and the logits that chose them, `[B, NEW_TOKENS, vocabulary]`."""

    tokens: torch.Tensor
    logits: torch.Tensor


class Outcome(NamedTuple):
    """Comparison of an answer with the baseline's answer.

    Attributes:
        status: One of `STATUSES`, or "" without a run.
        agreement: Share of equal tokens, or None without an answer.
        note: Raised exception, or position of the first token that differs.
    """

    status: str = ""
    agreement: float | None = None
    note: str = ""

    def __str__(self) -> str:
        return self.status if self.agreement is None else f"{self.agreement:.2f}"


NOT_RUN = Outcome()


@dataclasses.dataclass
class Row:
    name: str
    baseline_error: str = ""  # why the type fails with `DynamicCache`, or ""
    attention: str = ""  # the model's own attention implementation
    own: Outcome = NOT_RUN  # with this attention, in the model's dtype
    own_fp8: Outcome = NOT_RUN  # with this attention, in E4M3
    paged: Outcome = NOT_RUN  # with "fp8_paged", in the model's dtype
    paged_fp8: Outcome = NOT_RUN  # with "fp8_paged", in E4M3
    path: str = ""  # `Watch.list_paths` of "fp8_paged", or why the model does not use it
    captured: str = ""  # the result of `check_capture`
    seconds: float = 0.0

    @property
    def has_baseline(self) -> bool:
        return not self.baseline_error

    @property
    def accepts_paged(self) -> bool:
        return bool(self.path) and not self.path.startswith(("refused", "not"))

    def find_failures(self) -> list[str]:
        """Describe the failed outcomes. A type that refuses "fp8_paged" has not failed."""
        allowed_statuses = {
            "own": ("equal",), "own_fp8": ("differs", "close", "equal"),
            "paged": ("refused", "equal"), "paged_fp8": ("refused", "differs", "close", "equal"),
        }  # fmt: skip
        failures = [
            f"{self.name}, {label}: {getattr(self, label)!r}"
            for label, statuses in allowed_statuses.items()
            if self.has_baseline and getattr(self, label).status not in statuses
        ]
        if self.captured.startswith("WRONG"):
            failures.append(f"{self.name}, captured")
        return failures


def generate(
    model: PreTrainedModel, inputs: Inputs, cache: Any = None, num_new_tokens: int = NEW_TOKENS,
    *, inference: bool = True,
) -> Answer:  # fmt: skip
    """Return the greedy answer with a cache. None means the model's default cache."""
    arguments = {name: value.clone() for name, value in inputs.items()}
    if cache is not None:
        arguments["past_key_values"] = cache
    with torch.inference_mode(inference):
        output = model.generate(
            **arguments, max_new_tokens=num_new_tokens, do_sample=False, num_beams=1,
            pad_token_id=0, output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
    logits = torch.stack([step_logits.float() for step_logits in output["logits"]], dim=1)
    return Answer(output["sequences"][:, -logits.shape[1] :].clone(), logits)


def compare(expected: Answer, actual: Answer) -> Outcome:
    """Compare all tokens, and the logits up to the first different token of each row."""
    if expected.tokens.shape != actual.tokens.shape:
        return Outcome("differs", 0.0, f"{actual.tokens.shape[1]} tokens")
    is_different = expected.tokens != actual.tokens
    if is_different.any():
        row, step = is_different.nonzero()[0].tolist()
        agreement = 1 - is_different.float().mean().item()
        return Outcome("differs", agreement, f"row {row} from token {step}")
    logits_std = expected.logits[expected.logits.isfinite()].std().clamp_min(1e-12)
    expected_logits, actual_logits = (
        answer.logits.nan_to_num(torch.finfo().max) for answer in (expected, actual)
    )
    is_close = bool(((actual_logits - expected_logits).abs() <= TOLERANCE * logits_std).all())
    return Outcome("equal" if is_close else "close", 1.0)


class CacheMaker(NamedTuple):
    """Makes an `FP8PagedCache` in a dtype, as the argument of a model."""

    model: PreTrainedModel
    in_pair: bool  # whether the encoder of an encoder-decoder also gets a cache

    def __call__(self, dtype: str) -> Any:
        # With pages of 8 slots, prompts have several pages.
        options = {"dtype": dtype, **({"page_size": 8} if dtype == "auto" else {})}
        cache = FP8PagedCache(self.model.config, **options)
        if not self.in_pair:
            return cache
        # These types replace the encoder's cache with a new cache of its class, without options.
        replaces_cache = self.model.config.model_type in ("t5gemma", "t5gemma2")
        # The encoder's keys have no window, as in transformers.
        encoder_cache = DynamicCache() if replaces_cache else FP8PagedCache(**options)
        return EncoderDecoderCache(cache, encoder_cache)


def run_baseline(model: PreTrainedModel, inputs: Inputs) -> Answer:
    """Return the answer with `DynamicCache`.

    Raises:
        ValueError: The type stores no keys and values.
    """
    cache: Any = DynamicCache(config=model.config.get_text_config(decoder=True))
    if model.config.is_encoder_decoder:
        cache = EncoderDecoderCache(cache, DynamicCache())
    answer = generate(model, inputs, cache)
    if not cache.get_seq_length():
        raise ValueError("stores no keys and values")
    return answer


def list_cache_makers(model: PreTrainedModel, inputs: Inputs, expected: Answer) -> list[CacheMaker]:
    """Return the ways to pass a cache: alone, or in the pair of an encoder-decoder.

    An encoder-decoder also gets a single cache if a single `DynamicCache` gives `expected`.
    """
    makers = [CacheMaker(model, model.config.is_encoder_decoder)]
    if model.config.is_encoder_decoder:
        cache = DynamicCache(config=model.config.get_text_config(decoder=True))
        outcome = attempt(lambda: compare(expected, generate(model, inputs, cache)))
        if outcome.status == "equal":
            makers.append(CacheMaker(model, in_pair=False))
    return makers


def find_worst_outcome(
    expected: Answer, inputs: Inputs, dtype: str, makers: list[CacheMaker]
) -> Outcome:
    """Return the worst outcome over all ways to pass the cache."""
    outcomes = [
        attempt(lambda maker=maker: compare(expected, generate(maker.model, inputs, maker(dtype))))
        for maker in makers
    ]
    return min(outcomes, key=lambda outcome: STATUSES.index(outcome.status))


def attempt(run: Callable[[], Outcome]) -> Outcome:
    """Return the outcome of a run. An error of this package means "refused"."""
    try:
        return run()
    except Exception as error:  # a type may raise any error, and the outcome reports it
        status = "refused" if isinstance(error, FP8KVError) else "error"
        return Outcome(status, note=shorten_error(error))


def shorten_error(error: BaseException) -> str:
    """Return an error on one line, without phrases that many errors have in common."""
    text = re.sub(
        r"\(note: typos in the generate.*|Class validation error for validator '\w+': "
        r"|You can install it with.*|\| ",
        "", " ".join(str(error).split()),
    )  # fmt: skip
    return f"{type(error).__name__}: {text}"[:150]


class Watch:
    """Counts the calls of "fp8_paged" in decoding steps, by their path."""

    def __init__(self) -> None:
        self.path_counts: Counter[str] = Counter()

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        stock_attention = ALL_ATTENTION_FUNCTIONS[FP8_PAGED]

        def count_and_attend(module, query, key, value, *args, **kwargs):
            if query.shape[2] == 1:
                arguments = (kwargs.get(name) for name in ("indices", "block_indices"))
                is_sparse = any(argument is not None for argument in arguments)
                is_paged = isinstance(key, PagedKV) and isinstance(value, PagedKV)
                is_latent = is_paged and reads_stored_latents(module)
                path = "fused" if is_paged and not is_sparse else "dense"
                self.path_counts["fused, latent" if is_latent else path] += 1
            return stock_attention(module, query, key, value, *args, **kwargs)

        AttentionInterface.register(FP8_PAGED, count_and_attend)
        try:
            yield
        finally:
            AttentionInterface.register(FP8_PAGED, stock_attention)

    def list_paths(self) -> str:
        """Return the paths of calls ("fused", "fused, latent", "dense"), or "own" without calls."""
        return ", ".join(sorted(self.path_counts, reverse=True)) or "own"


def run_paged_attention(
    row: Row, expected: Answer, model: PreTrainedModel, inputs: Inputs, makers: list[CacheMaker]
) -> None:
    """Run the model with "fp8_paged", and set the row's `paged`, `paged_fp8` and `path`."""
    watch = Watch()
    model.set_attn_implementation(FP8_PAGED)
    if get_attention(model) == FP8_PAGED:
        with watch():
            row.paged = find_worst_outcome(expected, inputs, "auto", makers)
            row.paged_fp8 = find_worst_outcome(expected, inputs, FP8, makers)
        row.path = watch.list_paths()
        return

    # transformers has warned and kept the old attention. from_pretrained would change it.
    def run_forced() -> Outcome:
        forced_model, _ = build_model(row.name, attn_implementation=FP8_PAGED)
        with watch():
            maker = CacheMaker(forced_model, forced_model.config.is_encoder_decoder)
            return find_worst_outcome(expected, inputs, "auto", [maker])

    row.paged = attempt(run_forced)
    row.path = f"not switched; from_pretrained: {watch.list_paths()}"
    if row.paged.status == "error":
        row.paged = row.paged._replace(status="refused")
        row.path = "refused"
    row.paged_fp8 = Outcome("refused")


def check_capture(name: str, **options: Any) -> str:
    """Return "equal" if captured steps give the bits of eager steps, otherwise "WRONG".

    "equal (max_cache_len)" means that only a preallocated cache is captured. If no step was
    captured, return the reason. `options` are keywords of the cache.
    """
    model, inputs = build_model(name)
    answers = []
    for capture in (False, True):
        enable(model, dtype="model", page_size=8, capture=capture, **options)
        # In inference mode, a dispatch mode gets some operations whole, and otherwise in parts.
        # Their last bits may then differ.
        with recorded_graphs() as steps:
            answer = generate(model, inputs, num_new_tokens=CAPTURED_TOKENS, inference=False)
        answers.append(answer.logits.nan_to_num())
    if not torch.equal(*answers):
        return "WRONG"
    reason = steps[-1].obstacle if steps else "the model makes its own cache"
    if steps and steps[-1].num_replays:
        return "equal"
    reason = reason or "the cache has more tokens than the call allows"
    if "counts tokens on the host" in reason and not options:
        outcome = attempt(lambda: Outcome(check_capture(name, max_cache_len=64)))
        return "equal (max_cache_len)" if outcome.status == "equal" else reason
    return reason


def get_attention(model: PreTrainedModel) -> str:
    return str(model.config.get_text_config(decoder=True)._attn_implementation)


def check_type(name: str) -> Row:
    row = Row(name)
    start = time.perf_counter()
    try:
        model, inputs = build_model(name)
        if getattr(model.config.get_text_config(decoder=True), "attn_logit_softcapping", None):
            # Older versions choose sdpa here, which omits the softcap.
            model.set_attn_implementation("eager")
        row.attention = get_attention(model)
        expected = run_baseline(model, inputs)
    except Exception as error:  # the table lists a type that cannot run, with the reason
        row.baseline_error = shorten_error(error)
        return row
    makers = list_cache_makers(model, inputs, expected)
    row.own = find_worst_outcome(expected, inputs, "auto", makers)
    row.own_fp8 = find_worst_outcome(expected, inputs, FP8, makers)
    run_paged_attention(row, expected, model, inputs, makers)
    capture = attempt(lambda: Outcome(check_capture(name)))
    row.captured = capture.note or capture.status
    row.seconds = time.perf_counter() - start
    return row


def count_outcomes(rows: list[Row]) -> dict[str, int]:
    runnable_rows = [row for row in rows if row.has_baseline]
    accepting_rows = [row for row in runnable_rows if row.accepts_paged]
    return {
        "types": len(rows),
        "run under DynamicCache": len(runnable_rows),
        "equal under their own attention": sum(row.own.status == "equal" for row in runnable_rows),
        'accept "fp8_paged"': len(accepting_rows),
        'equal under "fp8_paged"': sum(row.paged.status == "equal" for row in accepting_rows),
        'fused under "fp8_paged"': sum("fused" in row.path for row in accepting_rows),
        'refuse "fp8_paged"': len(runnable_rows) - len(accepting_rows),
        "run in E4M3 under their own attention": sum(
            row.own_fp8.agreement is not None for row in runnable_rows
        ),
        'run in E4M3 under "fp8_paged"': sum(
            row.paged_fp8.agreement is not None for row in accepting_rows
        ),
        "captured": sum(row.captured.startswith("equal") for row in runnable_rows),
    }


def format_page(rows: list[Row], command: str) -> str:
    """Return the page: counts, the table of types that run, and the list of types that do not."""
    seconds = sum(row.seconds for row in rows)
    counts = "\n".join(f"* {label}: **{count}**" for label, count in count_outcomes(rows).items())
    return f"""# Model types

This reference is for users who look up a model type (`model_type` of its config). `{command}` \
generates it. Do not edit it.

transformers {transformers.__version__}, torch {torch.__version__}, \
Python {platform.python_version()}, {datetime.now(UTC):%Y-%m-%d}, \
{describe_hardware()["cpu"]}, {torch.get_num_threads()} thread(s), {seconds:.0f} s.

Each type is a tiny random model in fp32, which chooses eight tokens greedily for two rows with \
padding.

* **own attention** is transformers' choice. It reads dense K and V at each step.
* **equal**: with `dtype="model"` and pages of 8 slots, the tokens equal those under \
`DynamicCache`, and logits differ by at most {TOLERANCE:g} of their standard deviation.
* **E4M3** is the share of equal tokens with K and V in E4M3 and dynamic scales, not in the \
default E3M4. Random weights make choices close calls, so the share says little about quality.
* **"fp8_paged"** is how this attention reads. *fused*: the pages. *fused, latent*: pages of \
latents (MLA), directly as keys and values. *dense*: dense K and V. *own*: the model does not \
call it. *refused*: the model does not use transformers' attention registry. Use its own \
attention. *not switched*: `set_attn_implementation` does not change the model, and \
`from_pretrained(..., attn_implementation="fp8_paged")` was tried instead.
* **captured** is whether `enable(model, capture=True)` captures the decode step. *equal*: the \
logits of replays have the bits of eager steps, in a graph for CPUs that repeats calls of torch's \
dispatcher. *max_cache_len*: only with this argument. Any other text is the reason.

{counts}

| type | own attention | equal | E4M3 | "fp8_paged" | equal | E4M3 | captured | note |
|---|---|---|---|---|---|---|---|---|
{"".join(format_row(row) + chr(10) for row in rows if not row.baseline_error)}
## Types that did not run under DynamicCache

| type | reason |
|---|---|
{"".join(format_row(row) + chr(10) for row in rows if row.baseline_error)}"""


def format_row(row: Row) -> str:
    if row.baseline_error:
        return f"| {row.name} | {row.baseline_error} |"
    outcomes = (row.own, row.own_fp8, row.paged, row.paged_fp8)
    # A different token in E4M3 needs no note.
    notes = {
        outcome.note: None
        for outcome in outcomes
        if outcome.note and (outcome.status != "differs" or outcome in (row.own, row.paged))
    }
    cells = [row.name, row.attention, row.own.status, str(row.own_fp8)]
    cells += [row.path, row.paged.status, str(row.paged_fp8), row.captured, "; ".join(notes)]
    return "| " + " | ".join(cells) + " |"


def main(arguments: list[str] | None = None) -> int:
    """Return 1 if `Row.find_failures` finds a failure, otherwise 0."""
    parser = argparse.ArgumentParser(
        "python -m tests.tools.sweep", description="Run all model types."
    )
    parser.add_argument("--types", help="comma-separated names of types (default: all)")
    parser.add_argument("--out", type=Path, help="write the table as Markdown")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    # No file is downloaded. The tiny configs cause many warnings.
    os.environ["HF_HUB_OFFLINE"] = "1"
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    rows = []
    type_names = options.types.split(",") if options.types else list_types()
    for name in type_names:
        rows.append(check_type(name))
        print(f"{rows[-1].seconds:6.2f} s  {format_row(rows[-1])}", flush=True)
    for label, count in count_outcomes(rows).items():
        print(f"{count:5d}  {label}")
    if options.out:
        command = " ".join(["python -m tests.tools.sweep", *(arguments or sys.argv[1:])])
        options.out.write_text(format_page(rows, command), encoding="utf-8")
    failures = [failure for row in rows for failure in row.find_failures()]
    print("\n".join(["FAILED", *failures] if failures else []))
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
