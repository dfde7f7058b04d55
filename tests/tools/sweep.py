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

from hf_fp8kv import FP8KVError, FP8PagedCache, check_model, enable
from hf_fp8kv.attention.latent import reads_stored_latents
from hf_fp8kv.cache.paged_tensor import PagedKV
from hf_fp8kv.utils.environment import describe_hardware
from tests.helpers.recorded_graph import RecordedGraph, recorded_graphs
from tests.helpers.tiny_models import NEW_TOKENS, Inputs, build_model, list_types

FP8_PAGED = "fp8_paged"
FP8 = "fp8_e4m3"
# Tolerance for a different order of sums in fp32, as a share of the logits' standard deviation.
TOLERANCE = 1e-3
CAPTURED_TOKENS = 20  # number of tokens of a call with captured steps
OUTCOMES = ("own", "own_fp8", "paged", "paged_fp8")

CacheMaker = Callable[[str], Any]  # makes a cache with a dtype


class Answer(NamedTuple):
    """Tokens `[B, NEW_TOKENS]` and the logits that chose them, `[B, NEW_TOKENS, vocabulary]`."""

    tokens: torch.Tensor
    logits: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Comparison of an answer with the baseline's answer.

    Attributes:
        status: "equal", "close" (equal tokens, but logits that differ by more than rounding),
            "differs", "refused" or "error".
        gap: Largest difference of a logit, as a share of the logits' standard deviation.
        agreement: Share of equal tokens.
        note: Raised exception, or position of the first token that differs.
    """

    status: str
    gap: float | None = None
    agreement: float | None = None
    note: str = ""


@dataclasses.dataclass
class Row:
    """Results of one model type."""

    name: str
    baseline_error: str = ""  # why the type fails with `DynamicCache`, or ""
    attention: str = ""  # the model's own attention implementation
    own: Outcome | None = None  # with this attention, in the model's dtype
    own_fp8: Outcome | None = None  # with this attention, in E4M3
    paged: Outcome | None = None  # with "fp8_paged", in the model's dtype
    paged_fp8: Outcome | None = None  # with "fp8_paged", in E4M3
    path: str = ""  # `Watch.list_paths` of "fp8_paged", or why the model does not use it
    reported_path: str = ""  # the path that `check_model` reports, or its error
    captured: str = ""  # the result of `check_capture`
    seconds: float = 0.0

    @property
    def has_baseline(self) -> bool:
        return not self.baseline_error

    @property
    def accepts_paged(self) -> bool:
        is_refused = self.path.startswith(("refused", "not"))
        return self.has_baseline and bool(self.path) and not is_refused

    def find_failures(self) -> list[str]:
        """Describe the failed outcomes. A type that refuses "fp8_paged" has not failed."""
        failures = []
        for label in OUTCOMES if self.has_baseline else ():
            allowed_statuses = {"equal"} | ({"refused"} if label.startswith("paged") else set())
            allowed_statuses |= {"close", "differs"} if label.endswith("fp8") else set()
            outcome: Outcome | None = getattr(self, label)
            if outcome is None or outcome.status not in allowed_statuses:
                failures.append(f"{self.name}, {label}: {outcome}")
        if self.captured.startswith("WRONG"):
            failures.append(f"{self.name}, captured: {self.captured}")
        return failures


def generate(
    model: PreTrainedModel,
    inputs: Inputs,
    cache: Any = None,
    num_new_tokens: int = NEW_TOKENS,
    *,
    inference: bool = True,
) -> Answer:
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
        note = f"{actual.tokens.shape[1]} tokens instead of {expected.tokens.shape[1]}"
        return Outcome("differs", agreement=0.0, note=note)
    is_same = (expected.tokens == actual.tokens).long()
    has_same_prefix = torch.cumprod(
        torch.cat([torch.ones_like(is_same[:, :1]), is_same[:, :-1]], 1), 1
    ).bool()
    is_compared = expected.logits.isfinite() & actual.logits.isfinite() & has_same_prefix[..., None]
    logits_std = expected.logits[expected.logits.isfinite()].std().clamp_min(1e-12)
    gap = float(((expected.logits - actual.logits).abs() / logits_std)[is_compared].max())
    if not bool((expected.logits.isfinite() == actual.logits.isfinite())[has_same_prefix].all()):
        gap = float("inf")
    agreement = float(is_same.float().mean())
    if agreement < 1.0:
        row, step = (int(index) for index in (is_same == 0).nonzero()[0])
        return Outcome("differs", gap, agreement, f"row {row} from token {step}")
    return Outcome("equal" if gap <= TOLERANCE else "close", gap, agreement)


def make_cache_makers(model: PreTrainedModel, accepts_single: bool) -> dict[str, CacheMaker]:
    """Return functions that make an `FP8PagedCache`, by the way in which the model gets the cache.

    An encoder-decoder gets a pair of caches, for the decoder's and the encoder's tokens. It also
    gets a single cache if it accepts a single `DynamicCache` (`accepts_single`).
    """

    def make_cache(dtype: str, *config: Any) -> FP8PagedCache:
        options = {"page_size": 8} if dtype == "auto" else {}  # so that prompts have several pages
        return FP8PagedCache(*config, dtype=dtype, **options)

    makers: dict[str, CacheMaker] = {}
    # These types replace the encoder's cache with a new cache of its class, without options.
    replaces_cache = model.config.model_type in ("t5gemma", "t5gemma2")
    if accepts_single:
        makers["alone"] = lambda dtype: make_cache(dtype, model.config)
    if model.config.is_encoder_decoder:
        # The encoder's keys have no window, as in transformers.
        makers["pair"] = lambda dtype: EncoderDecoderCache(
            make_cache(dtype, model.config), DynamicCache() if replaces_cache else make_cache(dtype)
        )
    return makers


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


def accepts_single_cache(model: PreTrainedModel, inputs: Inputs, expected: Answer) -> bool:
    """Return whether a single `DynamicCache` gives the same answer as a pair."""
    if not model.config.is_encoder_decoder:
        return True
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    return attempt(lambda: compare(expected, generate(model, inputs, cache))).status == "equal"


def find_worst_outcome(
    expected: Answer, model: PreTrainedModel, inputs: Inputs, dtype: str,
    makers: dict[str, CacheMaker],
) -> Outcome:  # fmt: skip
    """Return the worst outcome over all ways to pass the cache."""
    outcomes = []
    for label, make_cache in makers.items():
        outcome = attempt(lambda f=make_cache: compare(expected, generate(model, inputs, f(dtype))))
        note = outcome.note and f"{label}: {outcome.note}"
        outcomes.append(dataclasses.replace(outcome, note=note))
    statuses = ("error", "refused", "differs", "close", "equal")
    return min(outcomes, key=lambda outcome: statuses.index(outcome.status))


def attempt(run: Callable[[], Outcome]) -> Outcome:
    """Return the outcome of a run. An error of this package means "refused"."""
    try:
        return run()
    except Exception as error:  # a type may raise any error, and the outcome reports it
        return Outcome(
            "refused" if isinstance(error, FP8KVError) else "error", note=shorten_error(error)
        )


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
                is_fused = is_paged and (is_latent or not is_sparse)
                path = ("fused, latent" if is_latent else "fused") if is_fused else "dense"
                self.path_counts[path] += 1
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
    row: Row, expected: Answer, model: PreTrainedModel, inputs: Inputs,
    makers: dict[str, CacheMaker],
) -> None:  # fmt: skip
    """Run the model with "fp8_paged", and set the row's `paged`, `paged_fp8` and `path`."""
    watch = Watch()
    model.set_attn_implementation(FP8_PAGED)
    if get_attention(model) == FP8_PAGED:
        with watch():
            row.paged = find_worst_outcome(expected, model, inputs, "auto", makers)
            row.paged_fp8 = find_worst_outcome(expected, model, inputs, FP8, makers)
        row.path = watch.list_paths()
        return

    # transformers has warned and kept the old attention. from_pretrained would change it.
    def run_forced() -> Outcome:
        model, inputs = build_model(row.name, attn_implementation=FP8_PAGED)
        accepts_single = not model.config.is_encoder_decoder
        with watch():
            return find_worst_outcome(
                expected, model, inputs, "auto", make_cache_makers(model, accepts_single)
            )

    row.paged = attempt(run_forced)
    row.path = f"not switched; from_pretrained: {watch.list_paths()}"
    if row.paged.status == "error":
        row.paged = dataclasses.replace(row.paged, status="refused")
        row.path = "refused"
    row.paged_fp8 = Outcome("refused")


class _EagerGraph:
    """A graph whose replay calls the model again, with the buffers of a captured step."""

    def capture(self, run: Callable[[], Any]) -> Any:
        self.run, self.result = run, run()
        return self.result

    def replay(self) -> None:
        self.result.logits.copy_(self.run().logits)


def check_capture(name: str, **options: Any) -> str:
    """Return "equal" if captured steps give the bits of eager steps, otherwise "WRONG".

    If no step was captured, return the reason. `options` are keywords of the cache.
    """
    model, inputs = build_model(name)

    def run(graph: Any, **keywords: Any) -> tuple[Answer, Any]:
        enable(model, dtype="model", page_size=8, **options, **keywords)
        # Inference mode sends operations through the dispatcher that modes otherwise see in parts.
        # Their last bits may differ from those without a mode.
        with recorded_graphs(graph) as steps:
            answer = generate(model, inputs, num_new_tokens=CAPTURED_TOKENS, inference=False)
        return answer, steps[-1] if steps else None

    stock, _ = run(RecordedGraph)
    eager, _ = run(_EagerGraph, capture=True)
    captured, step = run(RecordedGraph, capture=True)
    for expected in (stock, eager):
        if not torch.equal(captured.logits.nan_to_num(), expected.logits.nan_to_num()):
            return "WRONG"
    if step is not None and step.num_replays:
        return "equal"
    reason = "the model makes its own cache" if step is None else step.reason
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
    else:
        makers = make_cache_makers(model, accepts_single_cache(model, inputs, expected))
        row.own = find_worst_outcome(expected, model, inputs, "auto", makers)
        row.own_fp8 = find_worst_outcome(expected, model, inputs, FP8, makers)
        run_paged_attention(row, expected, model, inputs, makers)
        report = attempt(lambda: Outcome(check_model(model).path))
        row.reported_path = report.note or report.status
        outcome = attempt(lambda: Outcome(check_capture(name)))
        row.captured = outcome.note or outcome.status
    row.seconds = time.perf_counter() - start
    return row


def count_outcomes(rows: list[Row]) -> dict[str, int]:
    """Return the counts above the table, by label."""
    runnable_rows = [row for row in rows if row.has_baseline]
    accepting_rows = [row for row in runnable_rows if row.accepts_paged]

    def count_equal(outcomes: list[Outcome | None]) -> int:
        return sum(outcome is not None and outcome.status == "equal" for outcome in outcomes)

    def count_answered(outcomes: list[Outcome | None]) -> int:
        return sum(outcome is not None and outcome.agreement is not None for outcome in outcomes)

    return {
        "types": len(rows),
        "run under DynamicCache": len(runnable_rows),
        "equal under their own attention": count_equal([row.own for row in runnable_rows]),
        'accept "fp8_paged"': len(accepting_rows),
        'equal under "fp8_paged"': count_equal([row.paged for row in accepting_rows]),
        "of these fused": sum("fused" in row.path for row in accepting_rows),
        'refuse "fp8_paged"': len(runnable_rows) - len(accepting_rows),
        "run in E4M3 under their own attention": count_answered(
            [row.own_fp8 for row in runnable_rows]
        ),
        'run in E4M3 under "fp8_paged"': count_answered([row.paged_fp8 for row in accepting_rows]),
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
{"".join(format_row(row) + chr(10) for row in rows if row.has_baseline)}
## Types that did not run under DynamicCache

| type | reason |
|---|---|
{"".join(format_row(row) + chr(10) for row in rows if not row.has_baseline)}"""


def format_row(row: Row) -> str:
    if not row.has_baseline:
        return f"| {row.name} | {row.baseline_error} |"
    outcomes = [getattr(row, name) or Outcome("") for name in OUTCOMES]
    own, own_fp8, paged, paged_fp8 = outcomes
    hidden_notes = {
        "",
        *(outcome.note for outcome in (own_fp8, paged_fp8) if outcome.status == "differs"),
    }
    notes = dict.fromkeys(outcome.note for outcome in outcomes if outcome.note not in hidden_notes)
    cells = [row.name, row.attention, own.status, format_share(own_fp8)]
    cells += [row.path, paged.status, format_share(paged_fp8), row.captured, "; ".join(notes)]
    return "| " + " | ".join(cells) + " |"


def format_share(outcome: Outcome) -> str:
    return outcome.status if outcome.agreement is None else f"{outcome.agreement:.2f}"


def main(arguments: list[str] | None = None) -> int:
    """Return 1 if a type that runs under DynamicCache is neither equal nor refused."""
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
    names = options.types.split(",") if options.types else list_types()
    rows = []
    for name in names:
        row = check_type(name)
        rows.append(row)
        print(f"{row.seconds:6.2f} s  {format_row(row)}", flush=True)
    for label, count in count_outcomes(rows).items():
        print(f"{count:5d}  {label}")
    command = " ".join(["python -m tests.tools.sweep", *(arguments or sys.argv[1:])])
    if options.out:
        options.out.write_text(format_page(rows, command), encoding="utf-8")
    failures = [failure for row in rows for failure in row.find_failures()]
    for failure in failures:
        print("FAILED", failure)
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
