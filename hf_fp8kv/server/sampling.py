"""The choice of each request's next token: penalties, masks, temperature, seeds and scores.

A request with a temperature is sampled by noise, which is a function of its seed, the position and
the token alone, so a seed gives the same text, whatever else is in the step. Without noise the most
likely token is chosen. Log probabilities are the model's own, before anything changes its logits.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from ..serving.engines.sampling import gumbel_noise, noise_key
from .errors import APIError
from .structured import Guide

# Keyword of `add_request` that carries a Sequence.
SEQUENCE = "sequence"
ALL_TOKENS = 1.0
# A lower temperature means the most likely token, because divided logits would not be finite.
LEAST_TEMPERATURE = 1e-5
# JSON has no infinity. Other servers send this value instead.
_LEAST = -9999.0


class TokenLogprob(NamedTuple):
    """The log probability of a token at its position."""

    token: int
    logprob: float | None  # None for the first token of a prompt
    rank: int  # 1 for the most likely token
    top: tuple[tuple[int, float], ...]  # the most likely tokens, in this order


@dataclass(frozen=True)
class TokenRules:
    """Changes of one request's logits that depend on its tokens. The defaults change nothing.

    `bad_words` are sequences of tokens that must not occur in the answer. The answer must not end
    before `min_tokens`.
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
            if "prompt" not in kept:  # which takes milliseconds for a long prompt
                kept["prompt"] = _index(sequence.prompt, scores)
            # A token that occurs twice is penalized once.
            index = torch.cat([kept["prompt"], _index({*answer}, scores)])
            values, penalty = scores[index], self.repetition_penalty
            scores[index] = torch.where(values > 0, values / penalty, values * penalty)
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
    """One request of the engine: a prompt, its answer, and how each next token is chosen.

    The engine's thread changes `answer` and all fields after it. A copy is the same object,
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
    prompt_top: int | None = None  # as `top`, for the tokens of the prompt
    answer: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: dict[int, TokenLogprob] = field(default_factory=dict)  # from the second token
    cached_tokens: int = 0  # tokens of the prompt that were in the pages
    submitted_at: float = 0.0  # by `time.perf_counter`, which the engine uses as well
    last_token_at: float | None = None
    error: APIError | None = None  # that ended the answer
    kept: dict[str, torch.Tensor] = field(default_factory=dict)  # tensors that all steps share

    def __deepcopy__(self, memo: dict[int, Any]) -> "Sequence":
        return self


# For requests of the engine's own warmup.
_WARMUP = Sequence([], 1)


def score_tokens(logits: torch.Tensor, tokens: list[int], top: int) -> list[TokenLogprob]:
    """Return the log probabilities of N tokens for logits `[N, V]`."""
    logprobs = logits.float().log_softmax(-1).clamp_(min=_LEAST)
    index = _index(tokens, logits)
    chosen = logprobs.gather(1, index[:, None])
    ranks = (logprobs > chosen).sum(-1) + 1
    best = logprobs.topk(min(top, logits.shape[1]), dim=-1)
    columns = (chosen[:, 0], ranks, best.indices, best.values)
    return [
        TokenLogprob(token, logprob, rank, tuple(zip(indices, values, strict=True)))
        for token, logprob, rank, indices, values in zip(
            tokens, *(x.tolist() for x in columns), strict=True
        )
    ]


class Sampler:
    """The engine's logits processor, which changes each request's logits by its Sequence.

    It has the methods of transformers' ContinuousBatchingLogitsProcessorList and replaces it.
    `processors` are the processors of the model itself, for all requests. The arguments of a step
    are `[5, B]`, int32: temperature, top-p and min-p as float32, top-k, and the key of the noise.
    So a CUDA graph can hold them. Rules, grammars and scores are computed on the host.
    """

    do_processing = True
    tensors_required = 5

    def __init__(self, processors: Iterable[Any], vocabulary: int) -> None:
        self._processors, self._vocabulary = list(processors), vocabulary
        self._rows: list[Sequence] = []
        self._logits: dict[int, torch.Tensor] = {}  # by row, for log probabilities
        self._spans: list[_Span] = []

    def check_kwargs(self, kwargs: dict[str, Any]) -> None:
        """Do nothing, because a Sequence is complete."""

    def fill_defaults(self, int32_tensor: torch.Tensor) -> None:
        """Fill in the arguments of padding, `[5, 1]`."""
        int32_tensor.copy_(_encode([(0.0, ALL_TOKENS, 0.0, self._vocabulary, 0)]))

    def prepare_tensor_args(
        self, requests_in_batch: list[Any], arg_storage: torch.Tensor
    ) -> torch.Tensor:
        """Fill in the arguments `[5, >= B]` of a step's rows, and keep its requests."""
        self._spans = _find_spans(requests_in_batch)
        states = [request.state for request in requests_in_batch if request.has_new_token]
        self._rows = [state.logit_processor_kwargs.get(SEQUENCE, _WARMUP) for state in states]
        rows = []
        for state, sequence in zip(states, self._rows, strict=True):
            temperature, top_k = sequence.temperature, min(sequence.top_k, self._vocabulary)
            # The engine has counted the tokens of this step, so this is the next token's position.
            key = noise_key(sequence.seed, state.position_offset) if temperature else 0
            rows.append((temperature, sequence.top_p, sequence.min_p, top_k, key))
        if rows:
            arg_storage[:, : len(rows)] = _encode(rows).to(arg_storage.device)
        return arg_storage

    def __call__(
        self, input_ids: torch.Tensor, scores: torch.Tensor, arguments: torch.Tensor
    ) -> torch.Tensor:
        """Return scores `[B, V]`, the largest of which is at the next token."""
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
        """Record the log probability of a request's new token, with the logits of the same step."""
        logits = self._logits.pop(row, None)
        if logits is not None:
            sequence = self._rows[row]
            sequence.logprobs += score_tokens(logits[None], [token], sequence.top or 0)

    # -- log probabilities of prompts ------------------------------------------------------------

    def request_scores(
        self, model: Any, args: tuple[Any, ...], batch: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Make a model compute the logits of scored prompts. A forward pre-hook with keywords.

        The engine itself requests only the logits of a prompt's last token.
        """
        if not self._spans or "logits_to_keep" not in batch:
            return None
        keep = torch.cat([batch["logits_to_keep"], self._span_rows(batch)])
        return args, {**batch, "logits_to_keep": keep}

    def take_scores(
        self, model: Any, args: tuple[Any, ...], batch: dict[str, Any], output: Any
    ) -> Any:
        """Record the scores of prompts, and return the logits of new tokens. A forward hook."""
        if not self._spans:
            return None
        logits, count = output.logits, len(batch["logits_indices"])
        if "logits_to_keep" in batch:
            logits, extra = logits[:, :count], logits[0, count:]
        else:
            extra = logits[0, self._span_rows(batch)]
        for span in self._spans:
            part, extra = extra[: len(span.tokens)], extra[len(span.tokens) :]
            scores = score_tokens(part, span.tokens, span.sequence.prompt_top or 0)
            span.sequence.prompt_logprobs.update(enumerate(scores, span.position))
        return SimpleNamespace(logits=logits)

    def _span_rows(self, batch: dict[str, Any]) -> torch.Tensor:
        rows = [row for s in self._spans for row in range(s.first, s.first + len(s.tokens))]
        return torch.tensor(rows, dtype=torch.int64, device="cpu").to(batch["logits_indices"])


class _Span(NamedTuple):
    """Consecutive tokens of a step, all of one prompt, that predict tokens of the prompt."""

    sequence: Sequence
    first: int  # of the step's tokens
    position: int  # of the first predicted token
    tokens: list[int]  # the predicted tokens


def wants_prompt(state: Any) -> bool:
    """Return whether a request of the engine needs the log probabilities of its prompt."""
    sequence = state.logit_processor_kwargs.get(SEQUENCE)
    return sequence is not None and sequence.prompt_top is not None


def _find_spans(requests: Iterable[Any]) -> list[_Span]:
    """Return the spans of a step that predict tokens of scored prompts.

    `position_offset` includes the tokens of the step.
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
    """Return `[5, B]`, int32, which holds the first three values of each row as float32."""
    table = torch.tensor([row[3:] for row in rows], dtype=torch.int32, device="cpu")
    floats = torch.tensor([row[:3] for row in rows], dtype=torch.float32, device="cpu")
    return torch.cat([floats.view(torch.int32), table], dim=1).T


def sample(scores: torch.Tensor, arguments: torch.Tensor) -> torch.Tensor:
    """Return scores `[B, V]` with temperature, top-k, top-p, min-p and noise applied.

    `arguments` is `[5, B]`, see Sampler. A temperature of 0 does not change logits.
    """
    temperature, top_p, min_p = (row.view(torch.float32) for row in arguments[:3])
    top_k, keys = arguments[3], arguments[4]
    on_cpu = scores.device.type == "cpu"

    def is_used(rows: torch.Tensor) -> bool:  # a GPU would have to wait for the result
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
        # Nguyen et al. 2024. It comes last, since top-k and top-p change no ratio of probabilities.
        least = scores.amax(-1, keepdim=True) + min_p.log()[:, None]  # -inf for 0
        scores = scores.masked_fill(scores < least, -math.inf)
    if not on_cpu:
        noise = gumbel_noise(keys, scores.shape[1])
        return scores + noise.masked_fill_((keys == 0)[:, None], 0.0)
    rows = keys.nonzero()[:, 0]  # greedy rows need no noise
    if not len(rows):
        return scores
    return scores.index_add(0, rows, gumbel_noise(keys[rows], scores.shape[1]))
