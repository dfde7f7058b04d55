"""What requests ask of their logits beside sampling: penalties, biases and log probabilities.

All of it is worked out on the host from a request's own tokens, and changes or reads that request's
row alone. Log probabilities are those of the model, before anything changes its logits.
"""

import functools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from transformers.generation.continuous_batching import cb_logits_processors as stock

# Keywords of `add_request`.
RULES, LOGPROBS = "token_rules", "logprobs"
# Prompt tokens of a step whose logits are wanted: each has as many as the vocabulary.
PROMPT_STEP_TOKENS = 512
# JSON has no infinity: what other servers send instead.
_LEAST = -9999.0


# -- penalties and biases --------------------------------------------------------------------------


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
    # What does not change from token to token: of a long prompt it takes milliseconds.
    _kept: dict[str, torch.Tensor] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __bool__(self) -> bool:
        return self != _NO_RULES

    def apply(self, scores: torch.Tensor, state: Any) -> None:
        """Change one row of scores `[V]`, float32, in place; `state` is the engine's."""
        prompt, answer = split_tokens(state)
        if self.logit_bias:
            bias = self._keep("bias", self.logit_bias.values(), scores, torch.float32)
            scores[self._keep("biased", self.logit_bias, scores)] += bias
        blocked = {words[-1] for words in self.bad_words if _ends_with(answer, words[:-1])}
        if len(answer) < self.min_tokens:
            blocked |= {token for token in state._eos_token_ids if token < len(scores)}
        if blocked:
            scores[_index(blocked, scores)] = -math.inf
        if self.repetition_penalty != 1:
            # Rules are of one request, which has one prompt.
            known = self._keep("prompt", prompt, scores)
            index = torch.cat([known, _index({*answer}, scores)])  # a token twice is no matter
            found, penalty = scores[index], self.repetition_penalty
            scores[index] = torch.where(found > 0, found / penalty, found * penalty)
        if answer and (self.presence_penalty or self.frequency_penalty):
            counts = Counter(answer)
            number = torch.tensor([*counts.values()], device=scores.device)
            scores[_index(counts, scores)] -= (
                self.presence_penalty + self.frequency_penalty * number
            )

    def _keep(
        self, name: str, values: Any, scores: torch.Tensor, dtype: torch.dtype = torch.int64
    ) -> torch.Tensor:
        if name not in self._kept:
            self._kept[name] = torch.tensor([*values], dtype=dtype, device=scores.device)
        return self._kept[name]


_NO_RULES = TokenRules()


def _index(tokens: Any, scores: torch.Tensor) -> torch.Tensor:
    return torch.tensor([*tokens], dtype=torch.int64, device=scores.device)


def _ends_with(tokens: Sequence[int], end: Sequence[int]) -> bool:
    return not end or list(tokens[-len(end) :]) == list(end)


def split_tokens(state: Any) -> tuple[list[int], list[int]]:
    """Return the tokens of prompt and answer, also of a request that lost its pages meanwhile."""
    count = state._true_initial_tokens or len(state.initial_tokens)
    given: list[int] = state.initial_tokens
    return given[:count], given[count:] + state.generated_tokens


class RuleProcessor(stock.ContinuousBatchingLogitsProcessor):
    """Applies the rules of each request to its row."""

    supported_kwargs: dict[str, type] = {RULES: TokenRules}  # noqa: RUF012
    ignored_kwargs: tuple[str, ...] = ()

    def __init__(self) -> None:
        self._nothing = torch.empty(0, dtype=torch.int32, device="cpu")
        self._rows: list[tuple[int, TokenRules, Any]] = []

    def fill_defaults(self, int32_tensor: torch.Tensor) -> None:
        """Do nothing: the rules are not in the tensor."""

    def prepare_tensor_args(self, requests_with_new_token: list[Any]) -> torch.Tensor:
        """Keep the rules of a step's rows, which are those of the requests, in their order."""
        self._rows = [
            (row, rules, request.state)
            for row, request in enumerate(requests_with_new_token)
            if (rules := request.state.logit_processor_kwargs.get(RULES)) is not None
        ]
        return self._nothing

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        """Return scores `[B, V]`; changed in place."""
        for row, rules, state in self._rows:
            rules.apply(scores[row], state)
        return scores


# -- log probabilities -----------------------------------------------------------------------------


class TokenLogprob(NamedTuple):
    """The log probability of a token in its place."""

    token: int
    logprob: float
    rank: int  # 1: no token was more likely
    top: tuple[tuple[int, float], ...]  # the most likely tokens there, the first one first


class Logprobs:
    """The log probabilities that one request asked for, as the engine finds them.

    `top` is how many of the most likely tokens come with each token of the answer, `prompt_top`
    those of the prompt; None: none are wanted. A copy is the same object: an engine that computes
    a request again copies its arguments.
    """

    def __init__(self, top: int | None, prompt_top: int | None) -> None:
        self.top, self.prompt_top = top, prompt_top
        self.answer: list[TokenLogprob] = []
        self.prompt: dict[int, TokenLogprob] = {}  # by position; the first token has none

    def __deepcopy__(self, memo: dict[int, Any]) -> "Logprobs":
        return self


def score_tokens(logits: torch.Tensor, tokens: torch.Tensor, top: int) -> list[TokenLogprob]:
    """Return the log probabilities of tokens `[N]`, int64, for logits `[N, V]`."""
    logprobs = logits.float().log_softmax(-1)
    chosen = logprobs.gather(1, tokens[:, None])
    ranks = (logprobs > chosen).sum(-1) + 1
    best = logprobs.topk(min(top, logits.shape[1]), dim=-1)
    values = (tokens, chosen[:, 0], ranks, best.indices, best.values)
    return [
        TokenLogprob(token, max(own, _LEAST), rank, _pair(indices, others))
        for token, own, rank, indices, others in zip(*(x.tolist() for x in values), strict=True)
    ]


def _pair(indices: list[int], values: list[float]) -> tuple[tuple[int, float], ...]:
    return tuple((i, max(value, _LEAST)) for i, value in zip(indices, values, strict=True))


class LogprobRecorder(stock.ContinuousBatchingLogitsProcessor):
    """Keeps the logits of the rows whose log probabilities are wanted; before all that changes any.

    `record` has to be called with the tokens of the same step.
    """

    supported_kwargs: dict[str, type] = {LOGPROBS: Logprobs}  # noqa: RUF012
    ignored_kwargs: tuple[str, ...] = ()

    def __init__(self) -> None:
        self._nothing = torch.empty(0, dtype=torch.int32, device="cpu")
        self._wanted: dict[int, Logprobs] = {}  # by row
        self._logits: dict[int, torch.Tensor] = {}

    def fill_defaults(self, int32_tensor: torch.Tensor) -> None:
        """Do nothing: what is wanted is not in the tensor."""

    def prepare_tensor_args(self, requests_with_new_token: list[Any]) -> torch.Tensor:
        """Note the rows of a step whose log probabilities are wanted."""
        found = enumerate(request_logprobs(request.state) for request in requests_with_new_token)
        self._wanted = {row: one for row, one in found if one is not None and one.top is not None}
        self._logits = {}
        return self._nothing

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        """Return scores `[B, V]`, as they are."""
        self._logits = {row: scores[row].clone() for row in self._wanted}
        return scores

    def record(self, row: int, token: int) -> None:
        """Give a request the log probability of its new token."""
        wanted, logits = self._wanted.get(row), self._logits.pop(row, None)
        if wanted is not None and wanted.top is not None and logits is not None:
            index = torch.tensor([token], device=logits.device)
            wanted.answer += score_tokens(logits[None], index, wanted.top)


def request_logprobs(state: Any) -> Logprobs | None:
    """Return the log probabilities that a request of the engine wants."""
    found: Logprobs | None = state.logit_processor_kwargs.get(LOGPROBS)
    return found


def wants_prompt(state: Any) -> bool:
    """Return whether a request wants log probabilities of its prompt."""
    wanted = request_logprobs(state)
    return wanted is not None and wanted.prompt_top is not None


class _Span(NamedTuple):
    """Consecutive tokens of a step, all of one prompt, that predict tokens of the prompt."""

    wanted: Logprobs
    first: int  # of the step's tokens
    position: int  # of the first predicted token
    tokens: list[int]  # the predicted ones


def score_prompts(processor: Any) -> None:
    """Make a batch processor find the log probabilities of the prompts that want them.

    An engine computes the logits of a prompt's last token only: in a step with such a prompt it
    computes those of all its tokens.
    """
    tensors, runner = processor.inputs_and_outputs, processor.model_runner
    prepare, forward = tensors.prepare_batch_tensors, runner._forward_process_and_sample
    spans: list[_Span] = []

    @functools.wraps(prepare)
    def prepare_batch_tensors(requests_in_batch: list[Any], *args: Any, **kwargs: Any) -> None:
        spans[:] = _find_spans(requests_in_batch)
        prepare(requests_in_batch, *args, **kwargs)

    @functools.wraps(forward)
    def forward_and_score(model: Any, batch_data: dict[str, Any], *args: Any) -> None:
        forward(
            functools.partial(_score_spans, model, spans) if spans else model, batch_data, *args
        )

    tensors.prepare_batch_tensors = prepare_batch_tensors
    runner._forward_process_and_sample = forward_and_score


def _find_spans(requests: Sequence[Any]) -> list[_Span]:
    """Return what a step's tokens predict of prompts whose log probabilities are wanted."""
    spans, first = [], 0
    for request in requests:
        state, count = request.state, request.query_length
        if wants_prompt(state):
            start = state.position_offset + 1
            tokens = split_tokens(state)[0][start : start + count]
            if tokens:
                wanted = state.logit_processor_kwargs[LOGPROBS]
                spans.append(_Span(wanted, first, start, tokens))
        first += count
    return spans


def _score_spans(model: Any, spans: Sequence[_Span], **batch: Any) -> Any:
    """Run the model with the logits of spans, note these, and return what it would have returned.

    That has `logits` `[1, L, V]`: of the tokens that `logits_indices` names, or of all of the step.
    """
    own: torch.Tensor = batch["logits_indices"]
    rows = torch.cat([torch.arange(s.first, s.first + len(s.tokens), device="cpu") for s in spans])
    rows = rows.to(own.device, own.dtype)
    if "logits_to_keep" in batch:
        logits = model(**{**batch, "logits_to_keep": torch.cat([own, rows])}).logits
        result, extra = logits[:, : len(own)], logits[0, len(own) :]
    else:
        result = model(**batch).logits
        extra = result[0, rows]
    done = 0
    for span in spans:
        part = extra[done : done + len(span.tokens)]
        done += len(span.tokens)
        found = score_tokens(part, _index(span.tokens, part), span.wanted.prompt_top or 0)
        span.wanted.prompt.update(enumerate(found, span.position))
    return SimpleNamespace(logits=result)
