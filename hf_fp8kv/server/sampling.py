"""How the next token of each request is chosen: penalties, masks, temperature, seeds and scores.

The token with the largest sum of logit and noise is taken. With Gumbel's noise that is a sample
(Gumbel 1954), and without noise it is the most likely token. The noise is a function of the
request's seed, the position and the token alone: the same seed gives the same text, whatever else
is in the step. Log probabilities are those of the model, before anything changes its logits.
"""

import functools
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from .structured import Guide

# Keyword of `add_request` that carries a Sequence.
SEQUENCE = "sequence"
ALL_TOKENS = 1.0
# Below it, the most likely token: logits divided by less would not be finite.
LEAST_TEMPERATURE = 1e-5
# JSON has no infinity: what other servers send instead.
_LEAST = -9999.0


class TokenLogprob(NamedTuple):
    """The log probability of a token in its place."""

    token: int
    logprob: float | None  # None: nothing comes before the token
    rank: int  # 1: no token was more likely
    top: tuple[tuple[int, float], ...]  # the most likely tokens there, the first one first


@dataclass(frozen=True)
class TokenRules:
    """How one request changes its logits by the tokens that it has; the defaults change none.

    `bad_words` are sequences of tokens that must not occur in the answer. Ends of the answer are
    not allowed before `min_tokens`.
    """

    repetition_penalty: float = 1.0  # of tokens of prompt and answer (Keskar et al. 2019)
    presence_penalty: float = 0.0  # of tokens of the answer, as OpenAI defines both
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    min_tokens: int = 0
    bad_words: tuple[tuple[int, ...], ...] = ()

    def __bool__(self) -> bool:
        return self != _NO_RULES

    def apply(self, scores: torch.Tensor, sequence: "Sequence") -> None:
        """Change one row of scores `[V]`, float32, in place."""
        answer, kept = sequence.answer, sequence.kept
        if self.logit_bias:
            if "bias" not in kept:
                kept["biased"] = _index(self.logit_bias, scores)
                kept["bias"] = torch.tensor([*self.logit_bias.values()], device=scores.device)
            scores[kept["biased"]] += kept["bias"]
        blocked = {words[-1] for words in self.bad_words if _ends_with(answer, words[:-1])}
        if len(answer) < self.min_tokens:
            blocked |= {token for token in sequence.ends if token < len(scores)}
        if blocked:
            scores[_index(blocked, scores)] = -math.inf
        if self.repetition_penalty != 1:
            if "prompt" not in kept:  # of a long prompt this takes milliseconds
                kept["prompt"] = _index(sequence.prompt, scores)
            # A token that is there twice is penalized once.
            index = torch.cat([kept["prompt"], _index({*answer}, scores)])
            found, penalty = scores[index], self.repetition_penalty
            scores[index] = torch.where(found > 0, found / penalty, found * penalty)
        if answer and (self.presence_penalty or self.frequency_penalty):
            counts = Counter(answer)
            number = torch.tensor([*counts.values()], device=scores.device)
            scores[_index(counts, scores)] -= (
                self.presence_penalty + self.frequency_penalty * number
            )


_NO_RULES = TokenRules()


def _index(tokens: Iterable[int], scores: torch.Tensor) -> torch.Tensor:
    return torch.tensor([*tokens], dtype=torch.int64, device=scores.device)


def _ends_with(tokens: list[int], end: tuple[int, ...]) -> bool:
    return not end or tokens[-len(end) :] == list(end)


@dataclass(eq=False)
class Sequence:
    """A prompt, its answer and how each next token is chosen: one request of the engine.

    The engine's thread adds to `answer` and everything after it. A copy is the same object,
    because an engine that computes a request again copies the arguments of the request.
    """

    prompt: list[int]
    max_new_tokens: int
    ends: frozenset[int] = frozenset()  # tokens that end the answer
    temperature: float = 0.0  # 0 means the most likely token
    top_k: int = 2**31 - 1
    top_p: float = ALL_TOKENS
    min_p: float = 0.0
    seed: int = 0
    rules: TokenRules = _NO_RULES
    guide: Guide | None = None
    top: int | None = None  # most likely tokens to report with each token. None means no scores
    prompt_top: int | None = None  # the same for the tokens of the prompt
    answer: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: dict[int, TokenLogprob] = field(default_factory=dict)  # from the second token
    cached_tokens: int = 0  # of the prompt, that were in the pages
    submitted_at: float = 0.0  # by `time.perf_counter`, as the engine counts
    last_token_at: float | None = None
    kept: dict[str, torch.Tensor] = field(default_factory=dict)  # what stays the same in all steps

    def __deepcopy__(self, memo: dict[int, Any]) -> "Sequence":
        return self


# What a request of the engine's own warmup has.
_WARMUP = Sequence([], 1)


def score_tokens(logits: torch.Tensor, tokens: list[int], top: int) -> list[TokenLogprob]:
    """Return the log probabilities of N tokens for logits `[N, V]`."""
    logprobs, index = logits.float().log_softmax(-1), _index(tokens, logits)
    chosen = logprobs.gather(1, index[:, None])
    ranks = (logprobs > chosen).sum(-1) + 1
    best = logprobs.topk(min(top, logits.shape[1]), dim=-1)
    values = (chosen[:, 0], ranks, best.indices, best.values)
    return [
        TokenLogprob(
            token,
            max(own, _LEAST),
            rank,
            tuple((i, max(value, _LEAST)) for i, value in zip(indices, others, strict=True)),
        )
        for token, own, rank, indices, others in zip(
            tokens, *(x.tolist() for x in values), strict=True
        )
    ]


class Sampler:
    """Changes the logits of each request as that request asks; the engine's logits processor.

    It has the methods of transformers' ContinuousBatchingLogitsProcessorList and takes its place.
    `processors` are what the model itself needs, for all requests. A step's arguments are `[5, B]`
    int32: temperature, top-p and min-p as float32, top-k, and the key of the noise, so that a CUDA
    graph can hold them. Rules, grammars and scores are worked out on the host.
    """

    do_processing = True
    tensors_required = 5

    def __init__(self, processors: Iterable[Any], vocabulary: int) -> None:
        self._processors, self._vocabulary = list(processors), vocabulary
        self._rows: list[Sequence] = []
        self._logits: dict[int, torch.Tensor] = {}  # by row, for log probabilities
        self._spans: list[_Span] = []

    def check_kwargs(self, kwargs: dict[str, Any]) -> None:
        """Do nothing: a Sequence is complete."""

    def fill_defaults(self, int32_tensor: torch.Tensor) -> None:
        """Fill in what padding has, `[5, 1]`."""
        int32_tensor.copy_(_encode([(0.0, ALL_TOKENS, 0.0, self._vocabulary, 0)]))

    def prepare_tensor_args(
        self, requests_in_batch: list[Any], arg_storage: torch.Tensor
    ) -> torch.Tensor:
        """Fill in the arguments `[5, >= B]` of a step's rows, and note its requests."""
        self._spans = _find_spans(requests_in_batch)
        states = [request.state for request in requests_in_batch if request.has_new_token]
        self._rows = [state.logit_processor_kwargs.get(SEQUENCE, _WARMUP) for state in states]
        rows = []
        for state, one in zip(states, self._rows, strict=True):
            # The engine has counted the tokens of this step: the sampled one comes at this place.
            key = noise_key(one.seed, state.position_offset) if one.temperature else 0
            top_k = min(one.top_k, self._vocabulary)
            rows.append((one.temperature, one.top_p, one.min_p, top_k, key))
        if rows:
            arg_storage[:, : len(rows)] = _encode(rows).to(arg_storage.device)
        return arg_storage

    def __call__(
        self, input_ids: torch.Tensor, scores: torch.Tensor, arguments: torch.Tensor
    ) -> torch.Tensor:
        """Return the scores `[B, V]` whose largest number is the next token."""
        self._logits = {
            row: scores[row].clone()
            for row, sequence in enumerate(self._rows)
            if sequence.top is not None
        }
        for processor in self._processors:
            scores = processor(input_ids, scores)
        for row, sequence in enumerate(self._rows):
            if sequence.rules:
                sequence.rules.apply(scores[row], sequence)
            if sequence.guide is not None:
                blocked = sequence.guide.blocked(sequence.ends, self._vocabulary)
                mask = torch.from_numpy(blocked).to(scores.device)
                scores[row].masked_fill_(mask, -math.inf)
        return sample(scores, arguments[:, : len(scores)])

    def record(self, row: int, token: int) -> None:
        """Note the log probability of a request's new token, with the logits of the same step."""
        logits = self._logits.pop(row, None)
        if logits is not None:
            sequence = self._rows[row]
            sequence.logprobs += score_tokens(logits[None], [token], sequence.top or 0)

    # -- log probabilities of prompts ------------------------------------------------------------

    def ask_for_scores(
        self, model: Any, args: tuple[Any, ...], batch: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Have a model compute the logits of prompts too; a forward pre-hook with keywords.

        An engine computes the logits of a prompt's last token only.
        """
        if not self._spans or "logits_to_keep" not in batch:
            return None
        keep = torch.cat([batch["logits_to_keep"], self._span_rows(batch)])
        return args, {**batch, "logits_to_keep": keep}

    def take_scores(
        self, model: Any, args: tuple[Any, ...], batch: dict[str, Any], output: Any
    ) -> Any:
        """Note the scores of prompts, and return the logits of new tokens; a forward hook."""
        if not self._spans:
            return None
        logits, own = output.logits, len(batch["logits_indices"])
        if "logits_to_keep" in batch:
            logits, extra = logits[:, :own], logits[0, own:]
        else:
            extra = logits[0, self._span_rows(batch)]
        for span in self._spans:
            part, extra = extra[: len(span.tokens)], extra[len(span.tokens) :]
            found = score_tokens(part, span.tokens, span.sequence.prompt_top or 0)
            span.sequence.prompt_logprobs.update(enumerate(found, span.position))
        return SimpleNamespace(logits=logits)

    def _span_rows(self, batch: dict[str, Any]) -> torch.Tensor:
        rows = [row for s in self._spans for row in range(s.first, s.first + len(s.tokens))]
        return torch.tensor(rows, dtype=torch.int64, device="cpu").to(batch["logits_indices"])


class _Span(NamedTuple):
    """Consecutive tokens of a step, all of one prompt, that predict tokens of the prompt."""

    sequence: Sequence
    first: int  # of the step's tokens
    position: int  # of the first predicted token
    tokens: list[int]  # the predicted ones


def wants_prompt(state: Any) -> bool:
    """Return whether a request of the engine needs the log probabilities of its prompt."""
    sequence = state.logit_processor_kwargs.get(SEQUENCE)
    return sequence is not None and sequence.prompt_top is not None


def _find_spans(requests: Iterable[Any]) -> list[_Span]:
    """Return what a step's tokens predict of prompts whose log probabilities are wanted.

    The engine has counted the tokens of the step in `position_offset`.
    """
    spans, first = [], 0
    for request in requests:
        count = request.query_length
        if wants_prompt(request.state):
            sequence = request.state.logit_processor_kwargs[SEQUENCE]
            start = request.state.position_offset - count + 1
            if tokens := sequence.prompt[start : start + count]:
                spans.append(_Span(sequence, first, start, tokens))
        first += count
    return spans


# -- sampling --------------------------------------------------------------------------------------


def _encode(rows: list[tuple[float, float, float, int, int]]) -> torch.Tensor:
    """Return `[5, B]`, int32: the first three numbers of each row as float32."""
    table = torch.tensor([row[3:] for row in rows], dtype=torch.int32, device="cpu")
    floats = torch.tensor([row[:3] for row in rows], dtype=torch.float32, device="cpu")
    return torch.cat([floats.view(torch.int32), table], dim=1).T


def sample(scores: torch.Tensor, arguments: torch.Tensor) -> torch.Tensor:
    """Return scores `[B, V]` with temperature, top-k, top-p, min-p and noise applied.

    `arguments` is `[5, B]`, as Sampler has them. A temperature of 0 leaves logits as they are.
    """
    temperature, top_p, min_p = (row.view(torch.float32) for row in arguments[:3])
    top_k, keys = arguments[3], arguments[4]
    on_cpu = scores.device.type == "cpu"

    def is_used(rows: torch.Tensor) -> bool:  # a GPU would wait for the answer
        return not on_cpu or bool(rows.any())

    if is_used((temperature != 0) & (temperature != 1)):
        scores = scores / temperature.masked_fill(temperature == 0, 1.0)[:, None]
    if is_used(top_k < scores.shape[1]):
        ordered = scores.sort(-1, descending=True).values
        least = ordered.gather(1, (top_k - 1)[:, None].long())
        scores = scores.masked_fill(scores < least, -math.inf)
    if is_used(top_p < ALL_TOKENS):
        ordered, index = scores.sort(-1)
        dropped = ordered.softmax(-1).cumsum(-1) <= 1 - top_p[:, None]
        dropped[:, -1] = False
        scores = scores.masked_fill(dropped.scatter(-1, index, dropped), -math.inf)
    if is_used(min_p > 0):
        # Nguyen et al. 2024. Last, since top-k and top-p change no ratio of probabilities.
        least = scores.amax(-1, keepdim=True) + min_p.log()[:, None]  # -inf for 0
        scores = scores.masked_fill(scores < least, -math.inf)
    if not on_cpu:
        noise = gumbel_noise(keys, scores.shape[1])
        return scores + noise.masked_fill_((keys == 0)[:, None], 0.0)
    rows = keys.nonzero()[:, 0]  # greedy ones cost nothing
    if not len(rows):
        return scores
    return scores.index_add(0, rows, gumbel_noise(keys[rows], scores.shape[1]))


def noise_key(seed: int, position: int) -> int:
    """Return 31 bits of SplitMix64 (Steele et al. 2014), never 0: a key of `gumbel_noise`."""
    mask = 2**64 - 1
    x = (seed * 0x9E3779B97F4A7C15 + (position + 1) * 0xD1342543DE82EF95) & mask
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) & mask
    return ((x ^ x >> 31) >> 33) or 1


def gumbel_noise(keys: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """Return noise `[B, V]`, float32, for keys `[B]`, int32: the same for the same key and token.

    Uniform numbers are 23 bits of the mixed key and token, by the finalizer of MurmurHash3, and a
    half: with more bits float32 would round the largest to 1, whose noise is infinite.
    """
    bits = keys[:, None] + _token_bits(vocabulary, keys.device)
    uniform = _mix(bits).bitwise_right_shift_(9).bitwise_and_(0x7FFFFF).float()
    uniform.add_(0.5).mul_(2.0**-23)
    return uniform.log_().neg_().log_().neg_()


@functools.lru_cache(maxsize=4)
def _token_bits(vocabulary: int, device: torch.device) -> torch.Tensor:
    token = torch.arange(1, vocabulary + 1, dtype=torch.int32, device=device)
    return _mix(token * -1640531527)  # 2^32 over the golden ratio, as int32


def _mix(x: torch.Tensor) -> torch.Tensor:
    """Mix 32 bits, in place, so that each depends on all: fmix32 of MurmurHash3."""
    x ^= (x >> 16) & 0xFFFF  # the shift of int32 copies the sign
    x *= -2048144789  # 0x85EBCA6B
    x ^= (x >> 13) & 0x7FFFF
    x *= -1028477387  # 0xC2B2AE35
    x ^= (x >> 16) & 0xFFFF
    return x
