"""Measure which model types of transformers run with `FP8PagedCache`, and write a table.

    python -m tests.tools.sweep [--types llama,t5] [--out docs/architectures.md] [--json FILE]

Each type is a tiny random model (`tests/helpers/tiny_models.py`) that generates eight tokens
greedily, for a batch of two with padding. Every answer is compared with the answer of transformers'
`DynamicCache`. `dtype="auto"` must give the same tokens, under the model's own attention and under
"fp8_paged".
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import platform
import re
import signal
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

from hf_fp8kv import FP8KVError, FP8PagedCache, check_model
from hf_fp8kv.attention.latent import reads_stored_latents
from hf_fp8kv.cache.paged_tensor import PagedKV
from hf_fp8kv.utils.environment import hardware
from tests.helpers.tiny_models import NEW_TOKENS, Inputs, build, type_names

NAME = "fp8_paged"
FP8 = "fp8_e4m3"
TYPE_SECONDS = 60
# Tolerance for a different order of sums in fp32: a share of the logits' standard deviation.
TOLERANCE = 1e-3
SIDES = ("own", "own_fp8", "paged", "paged_fp8")

CacheMaker = Callable[[str], Any]


class TooSlow(BaseException):
    """A type took longer than its limit. Handlers of `Exception` do not catch this."""


class Answer(NamedTuple):
    """Tokens `[B, NEW_TOKENS]` and the logits that chose them, `[B, NEW_TOKENS, vocabulary]`."""

    tokens: torch.Tensor
    logits: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Comparison of an answer with the baseline's answer.

    Attributes:
        status: "equal", "close" (equal tokens, but logits farther apart than rounding explains),
            "differs", "refused" or "error".
        gap: Largest difference of a logit, as a share of the logits' standard deviation.
        agreement: Share of equal tokens.
        note: The exception that was raised, or the first token that differs.
    """

    status: str
    gap: float | None = None
    agreement: float | None = None
    note: str = ""


@dataclasses.dataclass
class Row:
    """Results of one type. `baseline` is the reason why `DynamicCache` does not run it, or ""."""

    name: str
    baseline: str = ""
    attention: str = ""
    own: Outcome | None = None
    own_fp8: Outcome | None = None
    paged: Outcome | None = None
    paged_fp8: Outcome | None = None
    path: str = ""
    report: str = ""
    seconds: float = 0.0

    @property
    def runs(self) -> bool:
        return not self.baseline

    @property
    def accepts(self) -> bool:
        return self.runs and bool(self.path) and not self.path.startswith(("refused", "not"))

    def failures(self) -> list[str]:
        """Return the labels of failed outcomes. A refused type has none."""
        failures = []
        for label in SIDES if self.runs else ():
            good = {"equal"} | ({"refused"} if label.startswith("paged") else set())
            good |= {"close", "differs"} if label.endswith("fp8") else set()
            outcome: Outcome | None = getattr(self, label)
            if outcome is None or outcome.status not in good:
                failures.append(f"{self.name}, {label}: {outcome}")
        return failures


def answer(model: PreTrainedModel, inputs: Inputs, cache: Any = None) -> Answer:
    """Generate greedily with the cache, or with the cache that `generate` makes itself."""
    arguments = {name: value.clone() for name, value in inputs.items()}
    if cache is not None:
        arguments["past_key_values"] = cache
    with torch.inference_mode():
        result = model.generate(
            **arguments, max_new_tokens=NEW_TOKENS, do_sample=False, num_beams=1, pad_token_id=0,
            output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
    steps = [step.float() for step in result["logits"]]
    return Answer(result["sequences"][:, -len(steps) :].clone(), torch.stack(steps, dim=1))


def compare(expected: Answer, actual: Answer) -> Outcome:
    """Compare all tokens, and the logits before the first different token of each row."""
    if expected.tokens.shape != actual.tokens.shape:
        note = f"{actual.tokens.shape[1]} tokens instead of {expected.tokens.shape[1]}"
        return Outcome("differs", agreement=0.0, note=note)
    is_same = (expected.tokens == actual.tokens).long()
    is_shared = torch.cumprod(
        torch.cat([torch.ones_like(is_same[:, :1]), is_same[:, :-1]], 1), 1
    ).bool()
    finite = expected.logits.isfinite() & actual.logits.isfinite() & is_shared[..., None]
    spread = expected.logits[expected.logits.isfinite()].std().clamp_min(1e-12)
    error = float(((expected.logits - actual.logits).abs() / spread)[finite].max())
    if not bool((expected.logits.isfinite() == actual.logits.isfinite())[is_shared].all()):
        error = float("inf")
    agreement = float(is_same.float().mean())
    if agreement < 1.0:
        row, step = (int(place) for place in (is_same == 0).nonzero()[0])
        return Outcome("differs", error, agreement, f"row {row} from token {step}")
    return Outcome("equal" if error <= TOLERANCE else "close", error, agreement)


def cache_makers(model: PreTrainedModel, accepts_single: bool) -> dict[str, CacheMaker]:
    """Return the ways to pass an `FP8PagedCache`.

    An encoder-decoder gets a pair, for its own tokens and for the encoder's. It also gets a single
    cache if it accepts a `DynamicCache` outside such a pair (`accepts_single`).
    """

    def make(dtype: str, *config: Any) -> FP8PagedCache:
        pages = {"page_size": 8} if dtype == "auto" else {}  # several pages if every token counts
        return FP8PagedCache(*config, dtype=dtype, **pages)

    makers: dict[str, CacheMaker] = {}
    # These make a new cache for the encoder, of the same class but without its options.
    remakes = model.config.model_type in ("t5gemma", "t5gemma2")
    if accepts_single:
        makers["alone"] = lambda dtype: make(dtype, model.config)
    if model.config.is_encoder_decoder:
        # The encoder's keys have no window, as in transformers.
        makers["pair"] = lambda dtype: EncoderDecoderCache(
            make(dtype, model.config), DynamicCache() if remakes else make(dtype)
        )
    return makers


def baseline(model: PreTrainedModel, inputs: Inputs) -> Answer:
    """Return the answer with transformers' own cache.

    Raises:
        ValueError: The type stores no keys and values.
    """
    cache: Any = DynamicCache(config=model.config.get_text_config(decoder=True))
    if model.config.is_encoder_decoder:
        cache = EncoderDecoderCache(cache, DynamicCache())
    result = answer(model, inputs, cache)
    if not cache.get_seq_length():
        raise ValueError("stores no keys and values")
    return result


def accepts_single_cache(model: PreTrainedModel, inputs: Inputs, expected: Answer) -> bool:
    """Return whether a single `DynamicCache` gives the same answer as a pair."""
    if not model.config.is_encoder_decoder:
        return True
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    return attempt(lambda: compare(expected, answer(model, inputs, cache))).status == "equal"


def find_worst_outcome(
    base: Answer, model: PreTrainedModel, inputs: Inputs, dtype: str, makers: dict[str, CacheMaker]
) -> Outcome:
    """Return the worst outcome over all ways to pass the cache."""
    outcomes = []
    for label, make in makers.items():
        outcome = attempt(lambda make=make: compare(base, answer(model, inputs, make(dtype))))
        note = outcome.note and f"{label}: {outcome.note}"
        outcomes.append(dataclasses.replace(outcome, note=note))
    order = ("error", "refused", "differs", "close", "equal")
    return min(outcomes, key=lambda outcome: order.index(outcome.status))


def attempt(run: Callable[[], Outcome]) -> Outcome:
    """Return the outcome of a run. An error of this package is a refusal."""
    try:
        return run()
    except Exception as error:  # a type may raise any error, which is reported
        return Outcome(
            "refused" if isinstance(error, FP8KVError) else "error", note=shorten_error(error)
        )


def shorten_error(error: BaseException) -> str:
    """Return an error on one line, without phrases that many errors share."""
    text = re.sub(
        r"\(note: typos in the generate.*|Class validation error for validator '\w+': "
        r"|You can install it with.*|\| ",
        "", " ".join(str(error).split()),
    )  # fmt: skip
    return f"{type(error).__name__}: {text}"[:150]


class Watch:
    """Counts the pages and dense tensors that reach "fp8_paged" in decoding steps."""

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        stock_attention = ALL_ATTENTION_FUNCTIONS[NAME]

        def count_and_attend(module, query, key, value, *args, **kwargs):
            if query.shape[2] == 1:
                sparse = any(kwargs.get(name) is not None for name in ("indices", "block_indices"))
                paged = isinstance(key, PagedKV) and isinstance(value, PagedKV)
                latent = paged and reads_stored_latents(module)
                fused = "fused, latent" if latent else "fused"
                self.seen[fused if paged and (latent or not sparse) else "dense"] += 1
            return stock_attention(module, query, key, value, *args, **kwargs)

        AttentionInterface.register(NAME, count_and_attend)
        try:
            yield
        finally:
            AttentionInterface.register(NAME, stock_attention)

    def path(self) -> str:
        """Return "fused", "fused, latent", "dense" or several, or "own" without any call."""
        return ", ".join(sorted(self.seen, reverse=True)) or "own"


def measure_paged(
    row: Row, base: Answer, model: PreTrainedModel, inputs: Inputs, makers: dict[str, CacheMaker]
) -> None:
    """Set the fields of `attn_implementation="fp8_paged"`."""
    watch = Watch()
    model.set_attn_implementation(NAME)
    if decoder_attention(model) == NAME:
        with watch():
            row.paged = find_worst_outcome(base, model, inputs, "auto", makers)
            row.paged_fp8 = find_worst_outcome(base, model, inputs, FP8, makers)
        row.path = watch.path()
        return

    # transformers keeps the old attention here, with a warning. from_pretrained would not.
    def run_forced() -> Outcome:
        model, inputs = build(row.name, attn_implementation=NAME)
        accepts_single = not model.config.is_encoder_decoder
        with watch():
            return find_worst_outcome(
                base, model, inputs, "auto", cache_makers(model, accepts_single)
            )

    row.paged = attempt(run_forced)
    row.path = f"not switched; from_pretrained: {watch.path()}"
    if row.paged.status == "error":
        row.paged, row.path = dataclasses.replace(row.paged, status="refused"), "refused"
    row.paged_fp8 = Outcome("refused")


def decoder_attention(model: PreTrainedModel) -> str:
    return str(model.config.get_text_config(decoder=True)._attn_implementation)


def check_type(name: str, *, only_baseline: bool = False) -> Row:
    """Return the row of a type. Only TooSlow and KeyboardInterrupt propagate."""
    row, start = Row(name), time.perf_counter()
    try:
        model, inputs = build(name)
        if getattr(model.config.get_text_config(decoder=True), "attn_logit_softcapping", None):
            # sdpa, which older versions choose here, omits the softcap.
            model.set_attn_implementation("eager")
        row.attention = decoder_attention(model)
        base = baseline(model, inputs)
    except Exception as error:  # a type that cannot run here is listed with the reason
        row.baseline = shorten_error(error)
    else:
        if not only_baseline:
            makers = cache_makers(model, accepts_single_cache(model, inputs, base))
            row.own = find_worst_outcome(base, model, inputs, "auto", makers)
            row.own_fp8 = find_worst_outcome(base, model, inputs, FP8, makers)
            measure_paged(row, base, model, inputs, makers)
            report = attempt(lambda: Outcome(check_model(model).path))
            row.report = report.note or report.status
    row.seconds = time.perf_counter() - start
    return row


@contextlib.contextmanager
def limit(seconds: int) -> Iterator[None]:
    """Raise TooSlow in the context when the time is over, if the system has alarms."""

    def ring(signum: int, frame: Any) -> None:
        raise TooSlow(f"took more than {seconds} s")

    if not hasattr(signal, "SIGALRM"):
        yield
        return
    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def sweep(names: list[str], *, only_baseline: bool = False) -> Iterator[Row]:
    """Yield a row per type, in order. A type that hangs is cut off."""
    for name in names:
        try:
            with limit(TYPE_SECONDS):
                yield check_type(name, only_baseline=only_baseline)
        except TooSlow as error:
            yield Row(name, baseline=shorten_error(error), seconds=TYPE_SECONDS)


def counts(rows: list[Row]) -> dict[str, int]:
    """Return the counts above the table."""
    ran = [row for row in rows if row.runs]
    accepts = [row for row in ran if row.accepts]

    def equal(outcomes: list[Outcome | None]) -> int:
        return sum(outcome is not None and outcome.status == "equal" for outcome in outcomes)

    def answered(outcomes: list[Outcome | None]) -> int:
        return sum(outcome is not None and outcome.agreement is not None for outcome in outcomes)

    return {
        "types": len(rows),
        "run under DynamicCache": len(ran),
        "equal under their own attention": equal([row.own for row in ran]),
        'accept "fp8_paged"': len(accepts),
        'equal under "fp8_paged"': equal([row.paged for row in accepts]),
        "of these fused": sum("fused" in row.path for row in accepts),
        'refuse "fp8_paged"': len(ran) - len(accepts),
        "run in E4M3 under their own attention": answered([row.own_fp8 for row in ran]),
        'run in E4M3 under "fp8_paged"': answered([row.paged_fp8 for row in accepts]),
    }


def markdown(rows: list[Row], command: str) -> str:
    """Return the page: counts, the table of types that run, and the list of types that do not."""
    seconds = sum(row.seconds for row in rows)
    numbers = "\n".join(f"* {label}: **{number}**" for label, number in counts(rows).items())
    return f"""# Model types

This reference is for users who look up a model type (`model_type` of its config). `{command}` \
generates it. Do not edit it.

transformers {transformers.__version__}, torch {torch.__version__}, \
Python {platform.python_version()}, {datetime.now(UTC):%Y-%m-%d}, \
{hardware()["cpu"]}, {torch.get_num_threads()} thread(s), {seconds:.0f} s.

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

{numbers}

| type | own attention | equal | E4M3 | "fp8_paged" | equal | E4M3 | note |
|---|---|---|---|---|---|---|---|
{"".join(_line(row) + chr(10) for row in rows if row.runs)}
## Types that did not run under DynamicCache

| type | reason |
|---|---|
{"".join(_line(row) + chr(10) for row in rows if not row.runs)}"""


def _line(row: Row) -> str:
    if not row.runs:
        return f"| {row.name} | {row.baseline} |"
    own, own_fp8, paged, paged_fp8 = outcomes = [getattr(row, x) or Outcome("") for x in SIDES]
    hidden = {"", *(x.note for x in (own_fp8, paged_fp8) if x.status == "differs")}
    notes = dict.fromkeys(x.note for x in outcomes if x.note not in hidden)
    cells = [row.name, row.attention, own.status, _share(own_fp8)]
    cells += [row.path, paged.status, _share(paged_fp8), "; ".join(notes)]
    return "| " + " | ".join(cells) + " |"


def _share(outcome: Outcome) -> str:
    return outcome.status if outcome.agreement is None else f"{outcome.agreement:.2f}"


def main(arguments: list[str] | None = None) -> int:
    """Return 1 if a type that runs under DynamicCache is neither equal nor refused."""
    parser = argparse.ArgumentParser(
        "python -m tests.tools.sweep", description="Sweep model types."
    )
    parser.add_argument("--types", help="comma-separated names (default: all)")
    parser.add_argument("--out", type=Path, help="write the table as Markdown")
    parser.add_argument("--json", type=Path, help="write the rows as JSON")
    parser.add_argument("--baseline", action="store_true", help="only run types under DynamicCache")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    # The configurations are odd, and no network is needed.
    os.environ["HF_HUB_OFFLINE"] = "1"
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    names = options.types.split(",") if options.types else type_names()
    rows = []
    for row in sweep(names, only_baseline=options.baseline):
        rows.append(row)
        print(f"{row.seconds:6.2f} s  {_line(row)}", flush=True)
    for label, number in counts(rows).items():
        print(f"{number:5d}  {label}")
    command = " ".join(["python -m tests.tools.sweep", *(arguments or sys.argv[1:])])
    if options.out:
        options.out.write_text(markdown(rows, command), encoding="utf-8")
    if options.json:
        text = json.dumps([dataclasses.asdict(row) for row in rows], indent=1)
        options.json.write_text(text + "\n", encoding="utf-8")
    failures = [] if options.baseline else [text for row in rows for text in row.failures()]
    for failure in failures:
        print("FAILED", failure)
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
