"""Which model types run with `FP8PagedCache`: every type that transformers builds here, measured.

    python -m tests.tools.sweep [--types llama,t5] [--out docs/architectures.md] [--json FILE]

Each type is a tiny random model (`tests/helpers/tiny_models.py`) that generates eight tokens
greedily, for a batch of two with padding. Every answer is compared with that of transformers' own
`DynamicCache`: `dtype="auto"` must give the same tokens, under the model's own attention and under
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
from typing import Any

import torch
import transformers
from transformers import (
    AttentionInterface,
    DynamicCache,
    EncoderDecoderCache,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tests.helpers.tiny_models import NEW_TOKENS, Inputs, build, type_names

NAME = "fp8_paged"
FP8 = "fp8_e4m3"
TYPE_SECONDS = 60
# The same sums in another order: fp32 logits, as a share of their standard deviation.
TOLERANCE = 1e-3

CacheMaker = Callable[[str], Any]


class TooSlow(Exception):
    """A type took longer than its limit."""


@dataclasses.dataclass(frozen=True)
class Answer:
    """Tokens `[B, NEW_TOKENS]` and the logits that chose them, `[B, NEW_TOKENS, vocabulary]`."""

    tokens: torch.Tensor
    logits: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How an answer compares with the baseline's.

    Attributes:
        status: "equal", "close" (equal tokens, but logits farther apart than rounding explains),
            "differs", "refused" or "error".
        gap: the largest difference of a logit, as a share of the logits' standard deviation.
        agreement: share of equal tokens.
        note: what was raised, or the first token that differs.
    """

    status: str
    gap: float | None = None
    agreement: float | None = None
    note: str = ""

    def status_or_note(self) -> str:
        """The status, or what was raised instead of one."""
        return self.note if self.status in ("error", "refused") and self.note else self.status


@dataclasses.dataclass
class Row:
    """One type: `baseline` is "" where it runs under `DynamicCache`, else why it does not."""

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
        """True if the type generates with a `DynamicCache` here."""
        return not self.baseline

    def failures(self) -> list[str]:
        """What a user would find broken; empty for a type that is served or clearly refused."""
        if not self.runs:
            return []
        found = []
        for label in ("own", "own_fp8", "paged", "paged_fp8"):
            outcome: Outcome | None = getattr(self, label)
            allowed = ("refused",) if label.startswith("paged") else ()
            good = ("equal",) if not label.endswith("fp8") else ("equal", "close", "differs")
            if outcome is None or outcome.status not in good + allowed:
                found.append(f"{self.name}, {label}: {outcome}")
        return found


def answer(model: PreTrainedModel, inputs: Inputs, cache: Any = None) -> Answer:
    """Greedy generation with the cache, or with the one that `generate` makes itself."""
    chosen = {} if cache is None else {"past_key_values": cache}
    with torch.inference_mode():
        out = model.generate(
            **{name: value.clone() for name, value in inputs.items()},
            **chosen,
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            num_beams=1,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
    steps = [step.float() for step in out["logits"]]
    return Answer(out["sequences"][:, -len(steps) :].clone(), torch.stack(steps, dim=1))


def compare(want: Answer, got: Answer) -> Outcome:
    """Tokens exactly, and logits up to the order of summation, as far as the tokens are equal."""
    if want.tokens.shape != got.tokens.shape:
        note = f"{got.tokens.shape[1]} tokens instead of {want.tokens.shape[1]}"
        return Outcome("differs", agreement=0.0, note=note)
    same = (want.tokens == got.tokens).long()
    # from the first other token on, a row is another text
    shared = torch.cumprod(torch.cat([torch.ones_like(same[:, :1]), same[:, :-1]], 1), 1).bool()
    finite = want.logits.isfinite() & got.logits.isfinite() & shared[..., None]
    spread = want.logits[want.logits.isfinite()].std().clamp_min(1e-12)
    gap = float(((want.logits - got.logits).abs() / spread)[finite].max())
    if not bool((want.logits.isfinite() == got.logits.isfinite())[shared].all()):
        gap = float("inf")
    agreement = float(same.float().mean())
    if agreement < 1.0:
        row, step = (int(place) for place in (same == 0).nonzero()[0])
        return Outcome("differs", gap, agreement, f"row {row} from token {step}")
    return Outcome("equal" if gap <= TOLERANCE else "close", gap, agreement)


def cache_makers(model: PreTrainedModel, bare: bool) -> dict[str, CacheMaker]:
    """The ways to hand over an `FP8PagedCache`.

    An encoder-decoder gets one for its own tokens and one for the encoder's; where it takes a
    `DynamicCache` that is not in such a pair (`bare`), also that.
    """
    from hf_fp8kv import FP8PagedCache

    makers: dict[str, CacheMaker] = {}
    # these make the encoder's part anew, of the same class but without its options
    remakes = model.config.model_type in ("t5gemma", "t5gemma2")
    if bare:
        makers["alone"] = lambda dtype: FP8PagedCache(model.config, **_form(dtype))
    if model.config.is_encoder_decoder:
        # as transformers makes it for models with a window: the encoder's keys have none
        makers["pair"] = lambda dtype: EncoderDecoderCache(
            FP8PagedCache(model.config, **_form(dtype)),
            DynamicCache() if remakes else FP8PagedCache(**_form(dtype)),
        )
    return makers


def _form(dtype: str) -> dict[str, Any]:
    """Several pages where every token counts, and the defaults for 8 bits."""
    return {"dtype": dtype, "page_size": 8} if dtype == "auto" else {"dtype": dtype}


def baseline(model: PreTrainedModel, inputs: Inputs) -> Answer:
    """The answer with transformers' own cache; raises if the type does not keep one."""
    cache: Any = DynamicCache(config=decoder_config(model))
    if model.config.is_encoder_decoder:
        cache = EncoderDecoderCache(cache, DynamicCache())
    found = answer(model, inputs, cache)
    if not cache.get_seq_length():
        raise ValueError("keeps no keys and values")
    return found


def takes_bare(model: PreTrainedModel, inputs: Inputs, want: Answer) -> bool:
    """True if a `DynamicCache` by itself gives the same answer, which encoder-decoders may not."""
    if not model.config.is_encoder_decoder:
        return True
    try:
        got = answer(model, inputs, DynamicCache(config=decoder_config(model)))
    except TooSlow:
        raise
    except Exception:  # any: then only the pair is tried
        return False
    return compare(want, got).status == "equal"


def decoder_config(model: PreTrainedModel) -> PreTrainedConfig:
    """The part of the configuration that describes the text decoder."""
    return model.config.get_text_config(decoder=True)


def compared(
    want: Answer, model: PreTrainedModel, inputs: Inputs, dtype: str, makers: dict[str, CacheMaker]
) -> Outcome:
    """The worst outcome over all ways to hand over the cache."""
    outcomes = []
    for label, make in makers.items():
        outcome = attempt(lambda make=make: compare(want, answer(model, inputs, make(dtype))))
        note = f"{label}: {outcome.note}" if label and outcome.note else outcome.note
        outcomes.append(dataclasses.replace(outcome, note=note))
    order = ("error", "refused", "differs", "close", "equal")
    return min(outcomes, key=lambda outcome: order.index(outcome.status))


def attempt(run: Callable[[], Outcome]) -> Outcome:
    """The outcome of a run; an error of ours is a refusal, any other one is an error."""
    from hf_fp8kv import Fp8KVError

    try:
        return run()
    except TooSlow:
        raise
    except Fp8KVError as error:
        return Outcome("refused", note=short(error))
    except Exception as error:  # a type may fail in any way: it is reported, not hidden
        return Outcome("error", note=short(error))


def short(error: BaseException) -> str:
    """An error on one line, without what is the same in all of them."""
    text = " ".join(str(error).split())
    for pattern, replacement in _SHORTER:
        text = re.sub(pattern, replacement, text)
    return f"{type(error).__name__}: {text}"[:150]


_SHORTER = (
    (r"\(note: typos in the generate.*", ""),
    (r"Class validation error for validator '\w+': ", ""),
    (r"You can install it with.*", ""),
    (r"\| ", ""),
)


class Watch:
    """Counts what reaches the attention "fp8_paged" in decoding steps: pages or dense tensors."""

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        from hf_fp8kv.attention.latent import passes_latents
        from hf_fp8kv.cache.paged_tensor import PagedKV

        inner = ALL_ATTENTION_FUNCTIONS[NAME]

        def counting(
            module: torch.nn.Module,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            *args: Any,
            **kwargs: Any,
        ) -> Any:
            if query.shape[2] == 1:
                sparse = any(kwargs.get(name) is not None for name in ("indices", "block_indices"))
                paged = isinstance(key, PagedKV) and isinstance(value, PagedKV)
                latent = paged and passes_latents(module, key, value)
                fused = "fused, latent" if latent else "fused"
                self.seen[fused if paged and (latent or not sparse) else "dense"] += 1
            return inner(module, query, key, value, *args, **kwargs)

        AttentionInterface.register(NAME, counting)
        try:
            yield
        finally:
            AttentionInterface.register(NAME, inner)

    def path(self) -> str:
        """ "fused", "fused, latent", "dense", or several; if it was never called, "own"."""
        return ", ".join(sorted(self.seen, reverse=True)) or "own"


def under_fp8_paged(
    row: Row, want: Answer, model: PreTrainedModel, inputs: Inputs, makers: dict[str, CacheMaker]
) -> None:
    """Fills in what happens with `attn_implementation="fp8_paged"`."""
    watch = Watch()
    model.set_attn_implementation(NAME)
    if decoder_attention(model) == NAME:
        with watch():
            row.paged = compared(want, model, inputs, "auto", makers)
            row.paged_fp8 = compared(want, model, inputs, FP8, makers)
        row.path = watch.path()
        return

    # transformers keeps the old attention here, with a warning; from_pretrained would not
    def forced() -> Outcome:
        model, inputs = build(row.name, attn_implementation=NAME)
        bare = not model.config.is_encoder_decoder
        with watch():
            return compared(want, model, inputs, "auto", cache_makers(model, bare))

    row.paged = attempt(forced)
    row.path = "refused"
    if row.paged.status == "error":
        row.paged = dataclasses.replace(row.paged, status="refused")
    else:
        row.path = f"not switched; from_pretrained: {watch.path()}"
    row.paged_fp8 = Outcome("refused")


def decoder_attention(model: PreTrainedModel) -> str:
    """The attention that the text decoder says it uses."""
    return str(decoder_config(model)._attn_implementation)


def support(model: PreTrainedModel) -> str:
    """What `hf_fp8kv.check_model` says in one word, or how it failed."""
    from hf_fp8kv import check_model

    return attempt(lambda: Outcome(check_model(model).path)).status_or_note()


def check_type(name: str, *, only_baseline: bool = False) -> Row:
    """Everything about one type. Raises nothing but TooSlow and KeyboardInterrupt."""
    row, start = Row(name), time.perf_counter()
    try:
        model, inputs = build(name)
        if getattr(decoder_config(model), "attn_logit_softcapping", None):
            # sdpa, which older versions choose here, leaves the cap out
            model.set_attn_implementation("eager")
        row.attention = decoder_attention(model)
        want = baseline(model, inputs)
    except TooSlow:
        raise
    except Exception as error:  # any: what cannot run here is listed with its reason
        row.baseline = short(error)
        row.seconds = time.perf_counter() - start
        return row
    if not only_baseline:
        makers = cache_makers(model, takes_bare(model, inputs, want))
        row.own = compared(want, model, inputs, "auto", makers)
        row.own_fp8 = compared(want, model, inputs, FP8, makers)
        under_fp8_paged(row, want, model, inputs, makers)
        row.report = support(model)
    row.seconds = time.perf_counter() - start
    return row


@contextlib.contextmanager
def limit(seconds: int) -> Iterator[None]:
    """Raises TooSlow inside when the time is over (where the system has alarms)."""

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
    """One row per type, in order; a type that hangs is cut off."""
    for name in names:
        try:
            with limit(TYPE_SECONDS):
                yield check_type(name, only_baseline=only_baseline)
        except TooSlow as error:
            yield Row(name, baseline=short(error), seconds=TYPE_SECONDS)


def counts(rows: list[Row]) -> dict[str, int]:
    """The numbers at the top of the table."""
    ran = [row for row in rows if row.runs]
    accepts = [row for row in ran if row.path and not row.path.startswith(("refused", "not"))]

    def equal(outcomes: list[Outcome | None]) -> int:
        return sum(outcome is not None and outcome.status == "equal" for outcome in outcomes)

    return {
        "types": len(rows),
        "run under DynamicCache": len(ran),
        "equal under their own attention": equal([row.own for row in ran]),
        'accept "fp8_paged"': len(accepts),
        'equal under "fp8_paged"': equal([row.paged for row in accepts]),
        "of these fused": sum("fused" in row.path for row in accepts),
        'refuse "fp8_paged"': len(ran) - len(accepts),
        "run in FP8 under their own attention": sum(
            row.own_fp8 is not None and row.own_fp8.agreement is not None for row in ran
        ),
        'run in FP8 under "fp8_paged"': sum(
            row.paged_fp8 is not None and row.paged_fp8.agreement is not None for row in accepts
        ),
    }


def markdown(rows: list[Row], command: str) -> str:
    """The page: counts, the table of what runs, and the list of what does not."""
    seconds = sum(row.seconds for row in rows)
    lines = [
        "# Model types",
        "",
        "Generated by `" + command + "`; do not edit.",
        "",
        f"transformers {transformers.__version__}, torch {torch.__version__}, "
        f"Python {platform.python_version()}, {datetime.now(UTC):%Y-%m-%d}; "
        f"{_processor()}, {torch.get_num_threads()} thread(s), {seconds:.0f} s.",
        "",
        "Tiny random models in fp32, two rows with padding, eight tokens chosen greedily. "
        '"Equal" means: with `dtype="auto"` and pages of 8 slots the same tokens as with '
        f"`DynamicCache`, and logits within {TOLERANCE:g} of their standard deviation.",
        'The columns "FP8" give the share of tokens that agree when K and V are stored in E4M3 '
        "with dynamic scales; with random weights the choices are close calls, and the share says "
        "little about quality.",
        "",
        *(f"* {label}: **{number}**" for label, number in counts(rows).items()),
        "",
        '| type | own attention | equal | FP8 | "fp8_paged" | equal | FP8 | note |',
        "|---|---|---|---|---|---|---|---|",
        *(_line(row) for row in rows if row.runs),
        "",
        "fused: attention reads the pages. fused, latent: the pages hold latents (MLA), which "
        "attention reads as keys and values as they are. dense: K and V are expanded first. "
        "refused: the model does not use transformers' attention registry, so use its own "
        "attention, which reads the same pages. "
        "not switched: `set_attn_implementation` leaves such a model as it is, and "
        '`from_pretrained(..., attn_implementation="fp8_paged")` was tried instead.',
        "",
        "## Not run under DynamicCache here",
        "",
        "| type | reason |",
        "|---|---|",
        *(f"| {row.name} | {row.baseline} |" for row in rows if not row.runs),
        "",
    ]
    return "\n".join(lines)


def _line(row: Row) -> str:
    own, own_fp8 = row.own or Outcome(""), row.own_fp8 or Outcome("")
    paged, paged_fp8 = row.paged or Outcome(""), row.paged_fp8 or Outcome("")
    notes = list(dict.fromkeys(o.note for o in (own, own_fp8, paged, paged_fp8) if o.note))
    if own_fp8.status == "differs" and own_fp8.note in notes:
        notes.remove(own_fp8.note)
    if paged_fp8.status == "differs" and paged_fp8.note in notes:
        notes.remove(paged_fp8.note)
    cells = [row.name, row.attention, own.status, _share(own_fp8)]
    cells += [row.path, paged.status, _share(paged_fp8), "; ".join(notes)]
    return "| " + " | ".join(cells) + " |"


def _share(outcome: Outcome) -> str:
    return outcome.status if outcome.agreement is None else f"{outcome.agreement:.2f}"


def _processor() -> str:
    """The processor's name, where the system tells."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def main(arguments: list[str] | None = None) -> int:
    """The command; 1 if a type that runs under DynamicCache is neither equal nor refused."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.tools.sweep", description="Sweep model types."
    )
    parser.add_argument("--types", help="comma-separated names; all if not given")
    parser.add_argument("--out", type=Path, help="write the table as Markdown")
    parser.add_argument("--json", type=Path, help="write the rows as JSON")
    parser.add_argument("--baseline", action="store_true", help="only what runs under DynamicCache")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    quiet()
    rows = []
    for row in sweep(
        options.types.split(",") if options.types else type_names(), only_baseline=options.baseline
    ):
        rows.append(row)
        line = _line(row) if row.runs else f"| {row.name} | {row.baseline} |"
        sys.stdout.write(f"{row.seconds:6.2f} s  {line}\n")
        sys.stdout.flush()
    for label, number in counts(rows).items():
        sys.stdout.write(f"{number:5d}  {label}\n")
    command = " ".join(["python -m tests.tools.sweep", *(arguments or sys.argv[1:])])
    if options.out:
        options.out.write_text(markdown(rows, command), encoding="utf-8")
    if options.json:
        text = json.dumps([dataclasses.asdict(row) for row in rows], indent=1)
        options.json.write_text(text + "\n", encoding="utf-8")
    failures = [] if options.baseline else [text for row in rows for text in row.failures()]
    for failure in failures:
        sys.stdout.write(f"FAILED {failure}\n")
    return 1 if failures else 0


def quiet() -> None:
    """No warnings about odd configurations, and no network."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()


if __name__ == "__main__":
    sys.exit(main())
