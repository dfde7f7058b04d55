"""Sampling of each request's next token: penalties, masks, temperature, seeds and logprobs.

For a request with a temperature, noise is added to the logits. The token with the largest logit is
chosen. The noise is a function of the seed, the position and the token, so a seed gives the same
text next to any other requests. Log-probabilities are computed from the model's unchanged logits.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from transformers import TopKLogitsWarper, TopPLogitsWarper
from transformers.generation.continuous_batching.cb_logits_processors import (
    ContinuousBatchingTopKLogitsWarper,
    ContinuousBatchingTopPLogitsWarper,
)

from ..serving.engines.noise import make_gumbel_noise, make_noise_key
from .errors import APIError
from .structured import Guide

# Keyword argument of `add_request` that passes a Sequence.
SEQUENCE_KEY = "sequence"
ALL_TOKENS = 1.0  # value of top_p that removes no token
# Below this temperature the most likely token is chosen, because logits would not stay finite.
MIN_TEMPERATURE = 1e-5
# JSON has no infinity. Other servers also send this value instead.
_MIN_LOGPROB = -9999.0
# transformers' warpers with a limit for each row, which is an argument of each call.
_TOP_K_WARPER = ContinuousBatchingTopKLogitsWarper(TopKLogitsWarper(1))
_TOP_P_WARPER = ContinuousBatchingTopPLogitsWarper(TopPLogitsWarper(ALL_TOKENS))


class TokenLogprob(NamedTuple):
    """The log-probability of a token at its position, and the most likely tokens there."""

    token: int
    logprob: float | None  # None for the first token of a prompt
    top_tokens: tuple[tuple[int, float], ...]  # tokens and their logprobs, the most likely first


@dataclass(frozen=True)
class TokenRules:
    """Changes of one request's logits that depend on its tokens. The defaults change nothing.

    The answer must not end before it has `min_tokens` tokens.
    """

    repetition_penalty: float = 1.0  # for tokens of prompt and answer (Keskar et al. 2019)
    presence_penalty: float = 0.0  # for tokens of the answer, as in OpenAI's API
    frequency_penalty: float = 0.0  # as `presence_penalty`, for each occurrence of a token
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    min_tokens: int = 0

    def __bool__(self) -> bool:
        return self != _NO_RULES

    def apply(self, logits: torch.Tensor, sequence: "Sequence") -> None:
        """Change one row of logits `[V]`, float32, in place."""
        answer = sequence.answer
        if self.logit_bias:
            biases = torch.tensor(list(self.logit_bias.values()), device=logits.device)
            logits[_make_index(self.logit_bias, logits)] += biases
        if len(answer) < self.min_tokens:
            blocked_tokens = [token for token in sequence.end_tokens if token < len(logits)]
            logits[_make_index(blocked_tokens, logits)] = -math.inf
        if self.repetition_penalty != 1:
            if sequence.prompt_index is None:  # a copy takes milliseconds for a long prompt
                sequence.prompt_index = _make_index(sequence.prompt, logits)
            # A token that occurs twice is penalized once.
            tokens = torch.cat([sequence.prompt_index, _make_index(set(answer), logits)])
            old_logits = logits[tokens]
            penalty = self.repetition_penalty
            logits[tokens] = torch.where(old_logits > 0, old_logits / penalty, old_logits * penalty)
        if answer and (self.presence_penalty or self.frequency_penalty):
            counts = Counter(answer)
            frequencies = torch.tensor(list(counts.values()), device=logits.device)
            penalties = self.presence_penalty + self.frequency_penalty * frequencies
            logits[_make_index(counts, logits)] -= penalties


_NO_RULES = TokenRules()


def _make_index(tokens: Iterable[int], logits: torch.Tensor) -> torch.Tensor:
    return torch.tensor(list(tokens), dtype=torch.int64, device=logits.device)


@dataclass(eq=False)
class Sequence:
    """One request of the engine: a prompt, its answer, and options for the choice of tokens.

    The engine's thread changes `answer` and all fields after it. Copying returns the same object,
    because an engine that computes a request again copies the arguments of the request.
    """

    prompt: list[int]
    max_new_tokens: int
    end_tokens: frozenset[int] = frozenset()  # tokens that end the answer
    temperature: float = 0.0  # 0 means the most likely token
    top_k: int = 2**31 - 1
    top_p: float = ALL_TOKENS
    min_p: float = 0.0
    seed: int = 0
    rules: TokenRules = _NO_RULES
    guide: Guide | None = None
    num_top_tokens: int | None = None  # length of each `top_tokens`. None means no logprobs
    cache_salt: str | None = None  # only requests with the same salt share pages
    answer: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    num_cached_tokens: int = 0  # number of the prompt's tokens that were in the pages
    submitted_at: float = 0.0  # time of `time.perf_counter`, like the engine's times
    last_token_at: float | None = None
    error: APIError | None = None  # the error that ended the answer
    prompt_index: torch.Tensor | None = None  # the prompt on the device, made by TokenRules

    def __deepcopy__(self, memo: dict[int, Any]) -> "Sequence":
        return self


_WARMUP_SEQUENCE = Sequence([], 1)  # of all requests in the engine's warmup


def make_logprobs(logits: torch.Tensor, tokens: list[int], num_top: int) -> list[TokenLogprob]:
    """Return the log-probabilities of N tokens, each with `num_top` top tokens, for `[N, V]`."""
    logprobs = logits.float().log_softmax(-1).clamp_(min=_MIN_LOGPROB)
    token_logprobs = logprobs.gather(1, _make_index(tokens, logits)[:, None])[:, 0]
    top_values, top_indices = logprobs.topk(min(num_top, logits.shape[1]), dim=-1)
    rows = zip(
        tokens, token_logprobs.tolist(), top_indices.tolist(), top_values.tolist(), strict=True
    )
    return [
        TokenLogprob(token, logprob, tuple(zip(indices, values, strict=True)))
        for token, logprob, indices, values in rows
    ]


class Sampler:
    """The engine's logits processor, which changes each request's logits by its Sequence.

    It replaces transformers' ContinuousBatchingLogitsProcessorList and has the same methods.
    `processors` are the model's processors, for all requests. The arguments of a step are
    `[5, B]`, int32: temperature, top-p and min-p as float32 bits, top-k, and the key of the noise.
    CUDA graphs can read this tensor. The host computes rules, grammars and log-probabilities.
    """

    do_processing = True
    tensors_required = 5

    def __init__(self, processors: Iterable[Any], vocab_size: int) -> None:
        self._processors = list(processors)
        self._vocab_size = vocab_size
        self._sequences: list[Sequence] = []
        self._logits: dict[int, torch.Tensor] = {}  # by row, for log-probabilities

    def check_kwargs(self, kwargs: dict[str, Any]) -> None:
        """Do nothing, because a Sequence is already validated."""

    def fill_defaults(self, int32_tensor: torch.Tensor) -> None:
        """Fill in the arguments of padding rows, `[5, 1]`."""
        int32_tensor.copy_(_encode_arguments([(0.0, ALL_TOKENS, 0.0, self._vocab_size, 0)]))

    def prepare_tensor_args(
        self, requests_in_batch: list[Any], arg_storage: torch.Tensor
    ) -> torch.Tensor:
        """Fill in the arguments `[5, >= B]` of a step's rows, and store their sequences."""
        states = [request.state for request in requests_in_batch if request.has_new_token]
        arguments = [state.logit_processor_kwargs for state in states]
        self._sequences = [kwargs.get(SEQUENCE_KEY, _WARMUP_SEQUENCE) for kwargs in arguments]
        rows = []
        for state, sequence in zip(states, self._sequences, strict=True):
            temperature = sequence.temperature
            top_k = min(sequence.top_k, self._vocab_size)
            # The engine has counted the tokens of this step, so this is the next token's position.
            key = make_noise_key(sequence.seed, state.position_offset) if temperature else 0
            rows.append((temperature, sequence.top_p, sequence.min_p, top_k, key))
        if rows:
            arg_storage[:, : len(rows)] = _encode_arguments(rows).to(arg_storage.device)
        return arg_storage

    def __call__(
        self, input_ids: torch.Tensor, logits: torch.Tensor, arguments: torch.Tensor
    ) -> torch.Tensor:
        """Return logits `[B, V]` whose maximum in each row is the next token."""
        self._logits = {
            row: logits[row].clone()
            for row, sequence in enumerate(self._sequences)
            if sequence.num_top_tokens is not None
        }
        for processor in self._processors:
            logits = processor(input_ids, logits)
        for row, sequence in enumerate(self._sequences):
            if sequence.rules:
                sequence.rules.apply(logits[row], sequence)
            if sequence.guide is not None:
                mask = sequence.guide.compute_mask(sequence.end_tokens, self._vocab_size)
                logits[row].masked_fill_(torch.from_numpy(mask).to(logits.device), -math.inf)
        return transform_logits(logits, arguments[:, : len(logits)])

    def record(self, row: int, token: int) -> None:
        """Record the log-probability of a row's new token, from the logits of the same step."""
        logits = self._logits.pop(row, None)
        if logits is not None:
            sequence = self._sequences[row]
            sequence.logprobs += make_logprobs(logits[None], [token], sequence.num_top_tokens or 0)


def _encode_arguments(rows: list[tuple[float, float, float, int, int]]) -> torch.Tensor:
    """Return rows as `[5, B]`, int32, with the first three values as float32 bits."""
    integers = torch.tensor([row[3:] for row in rows], dtype=torch.int32, device="cpu")
    floats = torch.tensor([row[:3] for row in rows], dtype=torch.float32, device="cpu")
    return torch.cat([floats.view(torch.int32), integers], dim=1).T


def transform_logits(logits: torch.Tensor, arguments: torch.Tensor) -> torch.Tensor:
    """Return logits `[B, V]` with temperature, top-k, top-p, min-p and noise applied.

    `arguments` is `[5, B]`, as in Sampler. A temperature of 0 does not change the logits.
    """
    temperature, top_p, min_p = (row.view(torch.float32) for row in arguments[:3])
    keys = arguments[4]
    is_on_cpu = logits.device.type == "cpu"

    def may_apply(is_affected: torch.Tensor) -> bool:  # on a GPU, a read would synchronize
        return not is_on_cpu or bool(is_affected.any())

    if may_apply((temperature != 0) & (temperature != 1)):
        logits = logits / temperature.masked_fill(temperature == 0, 1.0)[:, None]
    if may_apply(arguments[3] < logits.shape[1]):
        logits = _TOP_K_WARPER(logits, arguments[3])
    if may_apply(top_p < ALL_TOKENS):
        logits = _TOP_P_WARPER(logits, arguments[1])
    if may_apply(min_p > 0):
        # Nguyen et al. 2024. It can be last, because top-k and top-p keep probability ratios.
        threshold = logits.amax(-1, keepdim=True) + min_p.log()[:, None]  # -inf for 0
        logits = logits.masked_fill(logits < threshold, -math.inf)
    if not is_on_cpu:
        noise = make_gumbel_noise(keys, logits.shape[1])
        return logits + noise.masked_fill_((keys == 0)[:, None], 0.0)
    rows = keys.nonzero()[:, 0]  # greedy rows need no noise
    if not len(rows):
        return logits
    return logits.index_add(0, rows, make_gumbel_noise(keys[rows], logits.shape[1]))
