"""Structured output: answers that are JSON of a schema, or match a regular expression, or a choice.

llguidance says which tokens may follow in a grammar; here that becomes a mask of one request's
logits. A request's grammar is compiled before the engine has the request, in threads of its own,
and its errors end no other request.
"""

import asyncio
import copy
import logging
import math
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from transformers.generation.continuous_batching import cb_logits_processors as stock

from .errors import APIError
from .structured_output import read_grammar

logger = logging.getLogger(__name__)

# The keyword of `add_request`.
GUIDE = "guide"
_END = "<|hf_fp8kv end of the grammar|>"  # a token that no model has
_THREADS = 2
_SECONDS = 10.0  # that a request waits for its grammar
# States that the lexer of a grammar may have, some hundred bytes each. The other limits are
# llguidance's own, about 30 ms for a step.
_LEXER_STATES = 50_000
_NO_TOKEN = "none of the model's tokens can follow"


class GrammarError(Exception):
    """A grammar has no next token, or is too complex for llguidance's limits."""


class Guide:
    """Where one request is in its grammar. A deep copy goes on by itself.

    `usable` `[n]`, uint8, has a bit for each token that may be part of a text, the first token's
    lowest. Raises GrammarError.
    """

    def __init__(self, field: str, matcher: Any, usable: np.ndarray) -> None:
        self.field, self._usable = field, usable
        self.failures: list[GrammarError] = []  # of all copies
        self._start, self._matcher = matcher, matcher.deep_copy()
        self._look()
        if self.complete:
            raise GrammarError("it matches nothing but the empty text")

    def __copy__(self) -> "Guide":
        other = object.__new__(type(self))
        vars(other).update(vars(self))
        return other

    def __deepcopy__(self, memo: dict[int, Any]) -> "Guide":
        other = copy.copy(self)
        other._matcher = self._matcher.deep_copy()
        return other

    @property
    def complete(self) -> bool:
        """Whether the text matches, and none that is longer begins with it."""
        return self._accepting and not self._allowed.any()

    def accept(self, *tokens: int) -> None:
        """Go on by tokens."""
        if not self._matcher.consume_tokens(list(tokens)):
            raise GrammarError(_explain(self._matcher))
        self._look()

    def blocked(self, ends: list[int], vocabulary: int) -> np.ndarray:
        """Return which tokens must not follow, bool `[V]`; `ends` are those that end the answer."""
        bits = np.unpackbits(~self._allowed, count=vocabulary, bitorder="little")
        bits[ends] = not self._accepting
        return bits.view(bool)

    def is_whole(self, tokens: list[int]) -> bool:
        """Return whether an answer's tokens are all that the grammar has; for any thread."""
        other = copy.copy(self)
        other._matcher = self._start.deep_copy()
        try:
            other.accept(*tokens)
        except BaseException:  # as in `follow`, which reports it
            return False
        return other.complete

    def _look(self) -> None:
        """Find which tokens may follow, and whether the text may end."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            raise GrammarError(_explain(self._matcher))
        self._allowed = bits[: len(self._usable)] & self._usable
        self._accepting = bool(self._matcher.is_accepting())
        if not self._accepting and not self._allowed.any():
            raise GrammarError(_NO_TOKEN)


def follow(state: Any, token: int, vocabulary: int) -> str | None:
    """Have a request's guide go on by its new token; return what went wrong.

    Where the model has no token that ends an answer, the engine's limit of new tokens does.
    """
    guide = state.logit_processor_kwargs.get(GUIDE)
    if guide is None or token in state._eos_token_ids:
        return None
    try:
        guide.accept(token)
    except GrammarError as error:
        guide.failures.append(error)
        return f"{guide.field}: {error}"
    except BaseException as error:  # a panic of the library is no Exception
        logger.exception("a grammar failed")
        return f"{guide.field}: the grammar failed: {type(error).__name__}: {error}"
    if guide.complete and not _ends(state, vocabulary):
        state._new_tokens_limit = state.generated_len() + 1
    return None


def _ends(state: Any, vocabulary: int) -> list[int]:
    return [token for token in state._eos_token_ids if token < vocabulary]


def _explain(matcher: Any) -> str:
    """Return llguidance's message without its state."""
    text = str(matcher.get_error()).split("\n<", 1)[0]
    if text in ("", "NoExtensionBias"):
        return _NO_TOKEN
    return " ".join(text.split())[:300]


class GrammarMask(stock.ContinuousBatchingLogitsProcessor):
    """Takes the tokens away that a request's grammar does not allow; before all sampling."""

    supported_kwargs: dict[str, type] = {GUIDE: Guide}  # noqa: RUF012
    ignored_kwargs: tuple[str, ...] = ()

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary
        self._nothing = torch.empty(0, dtype=torch.int32, device="cpu")
        self._blocked: list[tuple[int, torch.Tensor]] = []  # row of the scores, mask

    def fill_defaults(self, int32_tensor: torch.Tensor) -> None:
        """Do nothing: the masks are not in the tensor."""

    def prepare_tensor_args(self, requests_with_new_token: list[Any]) -> torch.Tensor:
        """Keep the masks of a step's rows, which are those of the requests, in their order."""
        self._blocked.clear()
        for row, request in enumerate(requests_with_new_token):
            guide = request.state.logit_processor_kwargs.get(GUIDE)
            if guide is not None:
                ends = _ends(request.state, self._vocabulary)
                blocked = guide.blocked(ends, self._vocabulary)
                self._blocked.append((row, torch.from_numpy(blocked)))
        return self._nothing

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        """Return scores `[B, V]`; changed in place."""
        for row, blocked in self._blocked:
            scores[row].masked_fill_(blocked.to(scores.device), -math.inf)
        return scores


def why_unavailable(processor: Any) -> str | None:
    """Return why a batch processor cannot follow grammars, if it cannot."""
    if processor.use_async_batching:
        return "asynchronous batching begins a step before the last token is known"
    if getattr(processor.model_runner, "pad_inputs", False):
        return "CUDA graphs and compiled steps cannot change with a grammar"
    return None


# -- compiling -------------------------------------------------------------------------------------


class Grammars:
    """Compiles the grammars of requests for one model.

    `unavailable` says why the engine cannot follow any; None: it can.
    """

    def __init__(self, tokenizer: Any, vocabulary: int, unavailable: str | None) -> None:
        self._tokenizer, self._vocabulary = tokenizer, vocabulary
        self._unavailable = unavailable
        self._pool = ThreadPoolExecutor(_THREADS, "grammars")
        self._lock = threading.Lock()
        self._tokens: tuple[Any, np.ndarray] | None = None

    async def compile(self, body: Mapping[str, Any]) -> Guide | None:
        """Return the guide of a request, or None if it asks for text.

        Raises APIError: the request's fields or its grammar are wrong, or too complex.
        """
        asked = read_grammar(body)
        if asked is None:
            return None
        field, grammar = asked
        if self._unavailable is not None:
            raise _refused(field, f"this server has none, since {self._unavailable}; leave it out")
        loop = asyncio.get_running_loop()
        work = loop.run_in_executor(self._pool, self._compile, field, grammar)
        try:
            async with asyncio.timeout(_SECONDS):
                return await work
        except TimeoutError:
            expected = f"a grammar that is compiled within {_SECONDS:g} s"
            text = f"{field}: expected {expected}; simplify it, or try again later"
            raise APIError(400, text, param=field) from None

    def _compile(self, field: str, grammar: Callable[[Any], str]) -> Guide:
        try:
            import llguidance
        except ImportError:
            text = "this server has none without llguidance: pip install 'hf-fp8kv[serve]'"
            raise _refused(field, text) from None
        with self._lock:
            if self._tokens is None:
                self._tokens = self._read_tokens(field)
        tokens, usable = self._tokens
        limits = llguidance.LLParserLimits(max_lexer_states=_LEXER_STATES, verbose_errors=False)
        try:
            text = grammar(llguidance.LLMatcher)
            matcher = llguidance.LLMatcher(tokens, text, limits=limits, log_level=0)
            if matcher.is_error():
                raise GrammarError(_explain(matcher))
            return Guide(field, matcher, usable)
        except (GrammarError, ValueError) as error:
            raise APIError(400, f"{field}: {error}", param=field) from None

    def _read_tokens(self, field: str) -> tuple[Any, np.ndarray]:
        """Return llguidance's tokenizer, and the bits of tokens that may be part of a text."""
        import llguidance
        from tokenizers import Tokenizer

        tokenizer = inner_tokenizer(self._tokenizer)
        inner = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        inner.no_padding()
        inner.no_truncation()
        # Of a model's own tokens some end an answer, others do not: that is the request's choice.
        inner.add_special_tokens([_END])
        end = inner.token_to_id(_END)
        size = max(self._vocabulary, inner.get_vocab_size())
        try:
            tokens = llguidance.LLTokenizer(inner.to_str(), n_vocab=size, eos_token=end)
        except ValueError as error:
            text = f"this model's tokenizer is not supported ({error}); leave it out"
            raise _refused(field, text) from error
        added = tokenizer.added_tokens_decoder.items()
        special = [end, *tokenizer.all_special_ids, *(i for i, t in added if t.special)]
        usable = np.arange(size) < self._vocabulary
        usable[special] = False
        return tokens, np.packbits(usable, bitorder="little")


def inner_tokenizer(processor: Any) -> Any:
    """Return the tokenizer in a processor, or the tokenizer that stands for one."""
    return getattr(processor, "tokenizer", processor)


def _refused(field: str, why: str) -> APIError:
    message = f"{field}: no structured output: {why}"
    return APIError(400, message, param=field, code="unsupported_parameter")
