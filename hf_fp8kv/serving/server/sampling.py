"""Temperature, top-k, top-p, min-p and seed of each request by itself.

transformers' engine decides once whether it samples, draws from one generator for all, and its
server takes seeds and all else from whichever request comes. Here each request's arguments are
applied to its own logits, and the token with the largest sum of logit and noise is taken: with
Gumbel's noise that is a sample (Gumbel 1954; without noise it is the most likely token). The noise
is a function of the request's seed, the position and the token alone: the same seed gives the same
text, whatever else is in the step.

A row of logits that are no numbers ends its own request with an error, and no other.
"""

import functools
import math
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper
from transformers.generation.continuous_batching import cb_logits_processors as stock
from transformers.generation.logits_process import TopPLogitsWarper

from ..engines import unsupported_engine
from .grammars import GUIDE, GrammarError, GrammarMask, follow
from .logits import RULES, LogprobRecorder, RuleProcessor, TokenRules

ALL_TOKENS = 1.0
# Below it, the most likely token: logits divided by less would not be finite.
LEAST_TEMPERATURE = 1e-5
_NEEDED = ("logits_processor", "tensors_required", "do_processing", "_retrieve_processors_kwargs")
_SAMPLERS = (
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    stock.ContinuousBatchingTemperatureLogitsWarper,
    stock.ContinuousBatchingTopKLogitsWarper,
    stock.ContinuousBatchingTopPLogitsWarper,
)


class _Temperature(stock.ContinuousBatchingTemperatureLogitsWarper):
    """Temperature of each request; zero, the most likely token, leaves logits as they are."""

    def __init__(self) -> None:
        super().__init__(TemperatureLogitsWarper(1.0))

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        """Return scores `[B, V]`; `tensor_arg` `[>= B]` holds fp32 temperatures as int32."""
        temperature = tensor_arg[: len(scores)].view(torch.float32)
        unused = (temperature == 0) | (temperature == 1)
        if _skips(scores, unused):
            return scores
        return scores / temperature.masked_fill(unused, 1.0)[:, None]


class _TopK(stock.ContinuousBatchingTopKLogitsWarper):
    """Top-k of each request; the number of all tokens means all of them."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__(TopKLogitsWarper(vocabulary))

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        """Return scores `[B, V]`; `tensor_arg` `[>= B]` holds int32."""
        if _skips(scores, tensor_arg[: len(scores)] >= self.top_k):
            return scores
        return super().__call__(scores, tensor_arg)


class _TopP(stock.ContinuousBatchingTopPLogitsWarper):
    """Top-p of each request; 1.0 means all tokens."""

    def __init__(self) -> None:
        # The class rejects 1.0, which is what a request without top_p has.
        super().__init__(TopPLogitsWarper(0.5))
        self.top_p = ALL_TOKENS

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        """Return scores `[B, V]`; `tensor_arg` `[>= B]` holds fp32 as int32."""
        if _skips(scores, tensor_arg[: len(scores)].view(torch.float32) >= ALL_TOKENS):
            return scores
        return super().__call__(scores, tensor_arg)


class _MinP(stock.ContinuousBatchingLogitsProcessor):
    """The least share of the most likely token's probability of each request (Nguyen et al. 2024).

    It comes last: what top-k and top-p take away changes no ratio of probabilities.
    """

    supported_kwargs: dict[str, type] = {"min_p": float}  # noqa: RUF012
    ignored_kwargs: tuple[str, ...] = ()

    def fill_defaults(self, int32_tensor: torch.Tensor) -> None:
        """Fill in what a request without min_p has: 0.0."""
        int32_tensor.zero_()

    def prepare_tensor_args(self, requests_with_new_token: list[Any]) -> torch.Tensor:
        """Return each request's share, fp32 as int32."""
        given = [r.state.logit_processor_kwargs.get("min_p", 0.0) for r in requests_with_new_token]
        return torch.tensor(given, dtype=torch.float32, device="cpu").view(torch.int32)

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        """Return scores `[B, V]`; `tensor_arg` `[>= B]` holds fp32 as int32."""
        share = tensor_arg[: len(scores)].view(torch.float32)
        if _skips(scores, share <= 0):
            return scores
        least = scores.amax(-1, keepdim=True) + share.log()[:, None]  # -inf for 0
        return scores.masked_fill(scores < least, -math.inf)


class _Noise(stock.ContinuousBatchingLogitsProcessor):
    """Gumbel noise of each request that samples, at its position."""

    supported_kwargs: dict[str, type] = {"seed": int}  # noqa: RUF012
    ignored_kwargs: tuple[str, ...] = ()

    def fill_defaults(self, int32_tensor: torch.Tensor) -> None:
        """Fill in what a request without temperature has: no noise."""
        int32_tensor.zero_()

    def prepare_tensor_args(self, requests_with_new_token: list[Any]) -> torch.Tensor:
        """Return a key for each request, int32; 0: no noise."""
        keys = []
        for request in requests_with_new_token:
            given = request.state.logit_processor_kwargs
            # The engine has counted the tokens of this step: the sampled one comes at this place.
            key = noise_key(given.get("seed", 0), request.state.position_offset)
            keys.append(key if given.get("temperature") else 0)
        return torch.tensor(keys, dtype=torch.int64, device="cpu").to(torch.int32)

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        """Return scores `[B, V]`; `tensor_arg` `[>= B]` holds keys."""
        keys = tensor_arg[: len(scores)]
        if scores.device.type != "cpu":
            noise = gumbel_noise(keys, scores.shape[1])
            return scores + noise.masked_fill_((keys == 0)[:, None], 0.0)
        rows = keys.nonzero()[:, 0]  # greedy ones cost nothing
        if not len(rows):
            return scores
        return scores.index_add_(0, rows, gumbel_noise(keys[rows], scores.shape[1]))


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


def _skips(scores: torch.Tensor, unused: torch.Tensor) -> bool:
    """Return whether no request uses a processor; on the CPU: a GPU would wait for the answer."""
    return scores.device.type == "cpu" and bool(unused.all())


def per_request_sampling(manager: Any, vocabulary: int) -> LogprobRecorder:
    """Make a manager that has not started choose each request's tokens as that request says.

    Returns what records the log probabilities of tokens, for `isolate_rows`.

    Raises ConfigError if this transformers builds its engine in another way.
    """
    processors = getattr(manager, "logit_processor", None)
    missing = [name for name in _NEEDED if not hasattr(processors, name)]
    if processors is None or missing:
        raise unsupported_engine(f"has logits processors without {', '.join(_NEEDED)}")
    kept = [p for p in processors.logits_processor if not isinstance(p, _SAMPLERS)]
    recorder = LogprobRecorder()
    changes = [RuleProcessor(), GrammarMask(vocabulary)]
    samplers = [_Temperature(), _TopK(vocabulary), _TopP(), _MinP(), _Noise()]
    processors.logits_processor = LogitsProcessorList([recorder, *kept, *changes, *samplers])
    processors.tensors_required = 1 + len(changes) + len(samplers)
    processors.do_processing = True
    processors._retrieve_processors_kwargs()
    return recorder


def isolate_rows(
    processor: Any, vocabulary: int, recorder: LogprobRecorder, on_token: Callable[[Any], None]
) -> None:
    """Make a batch processor end a request that fails, and go on with the others.

    `on_token` gets the state of each request that has a new token, in the engine's thread;
    `recorder` is told the tokens.

    A request fails if its logits are not finite, or its grammar has no next token. Without finite
    logits a row has a token past the vocabulary, which tells the host without a second copy. Where
    a step takes the token of the last one on the device (asynchronous batching), it is taken back.
    """
    runner, tensors = processor.model_runner, processor.inputs_and_outputs

    def sample(_: Any, scores: torch.Tensor, output_ids: torch.Tensor) -> None:
        best, tokens = scores[0].max(-1)
        failed = best.isfinite().logical_not_()
        output_ids[0, : len(tokens)] = tokens + failed * vocabulary

    carry_over, finish = tensors.carry_over_tokens, tensors.prepare_batch_update

    def carry_over_tokens(input_ids: torch.Tensor, *others: torch.Tensor) -> None:
        carry_over(input_ids, *others)
        input_ids.remainder_(vocabulary)

    def prepare_batch_update() -> tuple[list[Any], list[int], None]:
        requests, tokens, _ = finish()
        kept, kept_tokens, rows = [], [], enumerate(tokens)
        for request in requests:
            row, token = next(rows) if request.has_new_token else (None, None)
            if request.state.error is not None:  # it was ended while this step ran
                continue
            error = None if token is None else _take(request.state, token, vocabulary)
            if error is not None:
                _fail(processor, request.state, error)
                continue
            kept.append(request)
            if row is not None and token is not None:
                recorder.record(row, token)
                kept_tokens.append(token)
                on_token(request.state)
        return kept, kept_tokens, None

    runner._sample = MethodType(sample, runner)
    tensors.prepare_batch_update = prepare_batch_update
    if processor.use_async_batching:
        tensors.carry_over_tokens = carry_over_tokens


def _take(state: Any, token: int, vocabulary: int) -> str | None:
    """Have a request's grammar go on by a new token; return what is wrong with the token."""
    if token < vocabulary:
        return follow(state, token, vocabulary)
    given = state.logit_processor_kwargs
    guide, rules = given.get(GUIDE), given.get(RULES, TokenRules())
    if guide is not None and (rules.bad_words or rules.min_tokens):
        text = "bad_words or min_tokens take away every token that may follow"
        guide.failures.append(GrammarError(text))  # the request's own fault
        return f"{guide.field}: {text}"
    if RULES in given or GUIDE in given:
        why = "logit_bias, bad_words, min_tokens and the answer's form leave none, or "
    else:
        why = ""
    return (
        f"expected finite logits, got none for token {state.position_offset}: {why}the model "
        "overflows on this prompt, or with these weights and dtype"
    )


def _fail(processor: Any, state: Any, error: str) -> None:
    """End one request with an error, and free its pages."""
    processor._handle_request_error(RuntimeError(error), state)
    processor.scheduler.finish_request(state.request_id)
    processor.scheduler.block_new_requests = False


def request_sampling(
    body: dict[str, Any], config: Any, vocabulary: int, seed: int
) -> dict[str, Any]:
    """Return the sampling arguments of `add_request` for a request; `seed`: if it has none.

    A temperature above zero, top_p, top_k or min_p asks for sampling, whatever the model's own
    default is.
    """
    asked = any(body.get(name) is not None for name in ("temperature", "top_p", "top_k", "min_p"))
    temperature = 1.0 if config.temperature is None else float(config.temperature)
    if not (config.do_sample or asked) or temperature < LEAST_TEMPERATURE:
        greedy = {"temperature": 0.0, "top_k": vocabulary, "top_p": ALL_TOKENS}
        return {**greedy, "min_p": 0.0, "seed": 0}
    top_k = int(body.get("top_k", config.top_k) or 0)
    top_k = min(top_k, vocabulary) if top_k > 0 else vocabulary
    top_p = ALL_TOKENS if config.top_p is None else float(config.top_p)
    seed = int(body.get("seed", seed))
    min_p = float(body.get("min_p", config.min_p) or 0.0)
    chosen = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    return {**chosen, "min_p": min_p, "seed": seed}
