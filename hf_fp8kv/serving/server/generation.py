"""What the handlers of transformers' server call to generate, for one engine that runs."""

import asyncio
import logging
import random
from abc import abstractmethod
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

from transformers.cli.serving.utils import CBGenerateManager, _StreamError, get_response_template

from .answer_text import AnswerStream, StopFinder, request_stops
from .errors import STOPPING, APIError
from .grammars import GUIDE, inner_tokenizer
from .latencies import Latencies
from .logits import LOGPROBS, RULES, TokenRules
from .requests import RequestTracker, ServerRequest, current_request
from .sampling import request_sampling

logger = logging.getLogger(__name__)

# New tokens of a request that names no number.
_NEW_TOKENS = 1024
_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")


class Generation(CBGenerateManager):
    """Answers requests of one model: the handlers call `generate_streaming` and its sibling.

    A subclass starts and stops the engine, `_cb`, and sets the limits.
    """

    model: Any
    vocabulary: int  # V
    page_tokens: int  # that one request may hold
    model_tokens: int | None  # of prompt and answer, if the model has a limit
    stopping: bool

    def __init__(
        self, config: Any, tracker: RequestTracker, latencies: Latencies, seed: int | None
    ) -> None:
        super().__init__(cb_config=config)
        self.tracker, self._latencies = tracker, latencies
        self._requests: WeakValueDictionary[str, ServerRequest] = WeakValueDictionary()
        self._seeds = random.Random(seed)  # of requests that name none
        self._cb: Any = None

    @abstractmethod
    def why_dead(self) -> str | None:
        """Return what stopped the engine's thread."""

    def generate_streaming(  # type: ignore[override]  # what it returns is used alike
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str,
        response_parser: Any = None,
    ) -> tuple[asyncio.Queue[Any], AnswerStream]:  # fmt: skip
        """Return a queue of the texts of an answer, and what cancels it; see the base class.

        `gen_config.max_new_tokens` becomes what the request gets; `request_id` is not used, since
        the engine has its own. Raises APIError: the request is too long, or the engine is not up.
        """
        request = current_request.get()
        answer = self._stream(request, processor, inputs["input_ids"], gen_config, response_parser)
        return asyncio.run_coroutine_threadsafe(answer, request.loop).result()

    async def _stream(
        self, request: ServerRequest, processor: Any, prompt: list[int], config: Any, parser: Any
    ) -> tuple[asyncio.Queue[Any], AnswerStream]:
        self._set_limit(request, prompt, config)

        def on_stop() -> None:
            config.max_new_tokens = None  # the handlers would take its last token for the end
            self._latencies.note_end(request)
            request.close()

        queue: asyncio.Queue[Any] = asyncio.Queue()
        stream = AnswerStream(
            request,
            _package_tokenizer(processor),
            queue,
            request_stops(request.body),
            parser,
            on_stop,
        )

        def on_error(error: APIError) -> None:
            request.error = error  # the handlers' own event for it is replaced by `adapt`
            queue.put_nowait(_StreamError(error.message))

        def on_output(output: Any) -> None:
            before = stream.total_tokens
            try:
                stream.put(output)
                self.tracker.new_tokens += stream.total_tokens - before
                if request.done:
                    return
                if output.error is not None:
                    request.finish()
                    on_error(self._output_error(request, output))
                elif output.is_finished():
                    _note_end(request, config, output.generated_tokens)
                    self._latencies.note_end(request)
                    request.finish()
                    if request.scores_only:
                        config.max_new_tokens = 0
                    stream.end()
            except Exception as error:
                logger.exception("an answer could not be turned into text")
                request.close()
                on_error(APIError(500, str(error)))

        self._submit(request, prompt, config, on_output, on_error, streaming=True)
        return queue, stream

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str
    ) -> tuple[str, int, list[int]]:
        """Return an answer's text, the number of its prompt's tokens, and its own tokens.

        Raises APIError: as `generate_streaming` does, and if the engine stops meanwhile.
        """
        await asyncio.sleep(0)  # what follows is on the event loop
        request, prompt = current_request.get(), inputs["input_ids"]
        self._set_limit(request, prompt, gen_config)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        stops, hidden = request_stops(request.body), request.stop_tokens
        plain = get_response_template(processor, model) is None  # else a parser needs all tokens
        finder = StopFinder(
            stops, _package_tokenizer(processor), skip_special=plain, after=request.min_tokens
        )

        def on_output(output: Any) -> None:
            try:
                take(output)
            except Exception as error:
                logger.exception("an answer could not be turned into text")
                request.close()
                on_error(APIError(500, str(error)))

        def take(output: Any) -> None:
            if future.done():
                return
            if output.error is not None:
                request.finish()
                on_error(self._output_error(request, output))
                return
            tokens = list(output.generated_tokens)
            finished = output.is_finished()
            stop = finder.find(tokens)
            if stop is not None:
                gen_config.max_new_tokens = None  # as in `_stream`
                self._latencies.note_end(request)
                request.close()
                request.cut_text = text = finder.text[:stop]
            elif finished:
                _note_end(request, gen_config, tokens)
                self._latencies.note_end(request)
                request.finish()
                seen = tokens[:-1] if tokens and tokens[-1] in hidden else tokens
                text = processor.decode(seen, skip_special_tokens=True)
            else:
                return
            self.tracker.new_tokens += len(tokens)
            if request.tool_call is not None:
                request.tool_call.text = text
            if request.scores_only:
                text, tokens, gen_config.max_new_tokens = "", [], 0
            future.set_result((text, len(prompt), tokens))

        def on_error(error: APIError) -> None:
            if not future.done():
                future.set_exception(error)

        self._submit(request, prompt, gen_config, on_output, on_error, streaming=bool(stops))
        answer: tuple[str, int, list[int]] = await future
        return answer

    # -- one request ------------------------------------------------------------------------------

    def _set_limit(self, request: ServerRequest, prompt: list[int], gen_config: Any) -> None:
        """Set `max_new_tokens` and ends, or raise APIError if the request cannot be answered."""
        if request.done or self.stopping or not self.is_alive():
            raise self._stopping_error()
        if not prompt:
            raise APIError(400, "expected a prompt of at least one token, got none")
        if max(prompt) >= self.vocabulary:
            text = f"prompt: expected tokens below {self.vocabulary}, got {max(prompt)}"
            raise APIError(400, text, param="prompt")
        # The last token is part of the answer, and never stored.
        room, holder = self.page_tokens + 1 - len(prompt), f"the pages hold {self.page_tokens}"
        if self.model_tokens is not None:
            # The engine's own new token is no answer, and the model never sees it.
            left = self.model_tokens - len(prompt) + request.scores_only
            if left < room:
                room, holder = left, f"the model holds {self.model_tokens}"
        field = next((name for name in _LIMITS if name in request.body), None)
        given = "generation_config" in request.body and gen_config.max_new_tokens is not None
        wanted = gen_config.max_new_tokens if field or given else min(_NEW_TOKENS, room)
        if room < 1 or wanted > room:
            raise APIError(
                400,
                f"expected a prompt and new tokens that fit, got {len(prompt)} tokens and "
                f"{max(wanted, 1)} new ones, and {holder}; send less, or ask for less",
                param=field,
                code="context_length_exceeded",
            )
        gen_config.max_new_tokens, request.prompt_ids = wanted, prompt
        ends = [] if request.body.get("ignore_eos") else _as_list(gen_config.eos_token_id)
        # An engine takes its own ends for none at all.
        gen_config.eos_token_id = [*ends, *sorted(request.stop_tokens)] or [-1]

    def _stopping_error(self) -> APIError:
        return APIError(503, self.why_dead() or STOPPING, code="stopping")

    def _output_error(self, request: ServerRequest, output: Any) -> APIError:
        guide = request.guide
        if guide is not None and guide.failures:
            return APIError(400, str(output.error), param=guide.field)
        return APIError(500 if self.is_alive() else 503, str(output.error))

    def _submit(
        self,
        request: ServerRequest,
        prompt: list[int],
        gen_config: Any,
        on_output: Callable[[Any], None],
        on_error: Callable[[APIError], None],
        *,
        streaming: bool,
    ) -> None:
        """Hand a request to the engine, which calls `on_output` on the event loop."""
        cb = self._cb

        def cancel() -> None:
            with cb.output_router._lock:
                cb.output_router.result_handlers.pop(request.id, None)
            cb.cancel_request(request.id)

        # First: an output that nobody takes is kept for ever.
        cb.register_result_handler(request.id, on_output)
        request.begin(cancel=cancel, on_error=on_error)
        self._requests[request.id] = request
        rules = request.rules or TokenRules()
        asked = {GUIDE: request.guide, LOGPROBS: request.logprobs, RULES: rules if rules else None}
        added = cb.add_request(
            prompt,
            request_id=request.id,
            max_new_tokens=gen_config.max_new_tokens,
            streaming=streaming,
            eos_token_id=gen_config.eos_token_id,
            **{name: value for name, value in asked.items() if value is not None},
            **request_sampling(
                request.body, gen_config, self.vocabulary, self._seeds.getrandbits(63)
            ),
        )
        if added is None:
            request.close()
            raise self._stopping_error()
        self.tracker.prompt_tokens += len(prompt)


def _as_list(tokens: int | list[int] | None) -> list[int]:
    return tokens if isinstance(tokens, list) else [] if tokens is None else [tokens]


def _package_tokenizer(processor: Any) -> Any:
    return inner_tokenizer(processor)._tokenizer


def _note_end(request: ServerRequest, gen_config: Any, tokens: list[int]) -> None:
    """Tell an answer that was truncated from one that ended by itself with its last token."""
    ends, guide = gen_config.eos_token_id, request.guide
    if (tokens and tokens[-1] in ends) or (guide is not None and guide.is_whole(tokens)):
        gen_config.max_new_tokens = None
    else:
        request.truncated = True
