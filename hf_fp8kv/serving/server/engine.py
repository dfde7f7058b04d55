"""The server's engine: one model, continuous batching, started before the first request.

It takes the place of transformers' `CBGenerateManager`, which is made for one well-behaved client:
there the first request decides how all others are sampled, one that is longer than the pages stops
the engine, and one whose client has gone runs to its end unless it was streaming.
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

from transformers import GenerationConfig
from transformers.cli.serving.utils import (
    CBGenerateManager,
    CBStreamer,
    GenerationState,
    _StreamError,
    get_response_template,
)

from ...errors import ConfigError
from .. import Usage, usage
from .errors import STOPPING, APIError
from .grammars import GUIDE, Grammars, why_unavailable
from .latencies import Latencies
from .requests import RequestTracker, ServerRequest, current_request
from .sampling import isolate_rows, per_request_sampling, request_sampling
from .scheduling import share_steps
from .stop_strings import StopFinder, StoppingQueue, find_stop, request_stops

logger = logging.getLogger(__name__)

_START_SECONDS = 600.0
_STOP_SECONDS = 30.0
# New tokens of a request that names no number.
_NEW_TOKENS = 1024
_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")


class Engine(CBGenerateManager):
    """Answers requests of one model from FP8 pages; of its methods the handlers call `generate_*`.

    `model` is one that `hf_fp8kv.serving.enable` was called on, `config` a ContinuousBatchingConfig
    or None for transformers' own defaults; `seed` makes the answers of requests without a seed the
    same in each run, as long as the requests come in the same order. `max_model_tokens`: of prompt
    and answer, if that is fewer than the model has.
    """

    def __init__(
        self, model: Any, config: Any, tracker: RequestTracker, latencies: Latencies,
        seed: int | None = None, max_model_tokens: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(cb_config=config)
        self._latencies = latencies
        self._requests: WeakValueDictionary[str, ServerRequest] = WeakValueDictionary()
        self._seeds = random.Random(seed)  # of requests that name none
        self._cb: Any = None
        self.model, self.tracker = model, tracker
        text = model.config.get_text_config()
        self.vocabulary = int(text.vocab_size)
        self.page_tokens = 0  # that one request may hold
        limit = getattr(text, "max_position_embeddings", None)
        self.model_tokens = limit if isinstance(limit, int) and limit > 0 else None
        if max_model_tokens is not None:
            self.model_tokens = min(max_model_tokens, self.model_tokens or max_model_tokens)
        self.stopping = False

    def begin(self) -> None:
        """Start the engine, and return when its pages are there; raise ConfigError without them."""
        config: dict[str, Any] = self.model.generation_config.to_dict()
        sampling = {"do_sample": True, "temperature": 0.7, "use_cache": False}
        cb = self.model.init_continuous_batching(
            generation_config=GenerationConfig(**{**config, **sampling}),
            continuous_batching_config=self._cb_config,
        )
        per_request_sampling(cb, self.vocabulary)
        self._cb = cb
        cb.start()
        deadline = time.monotonic() + _START_SECONDS
        while cb.batch_processor is None:
            error = cb.background_thread_status.fatal_error
            if error is not None or not cb.is_running() or time.monotonic() > deadline:
                self.stop()
                raise ConfigError(
                    f"expected an engine for continuous batching, got: {error or 'no answer'}; "
                    "--cb-num-blocks and --cb-max-batch-tokens make it smaller"
                ) from error
            time.sleep(0.01)
        isolate_rows(cb.batch_processor, self.vocabulary, self._note_token)
        share_steps(cb.batch_processor.scheduler)
        cb.batch_processor.cache.on_prefix = self._note_prefix
        self.page_tokens = cb.batch_processor.cache.max_request_tokens()
        if self.page_tokens < 2:
            self.stop()
            raise ConfigError(
                f"expected pages for some tokens, got {self.page_tokens}; pass a larger "
                "--cb-num-blocks"
            )

    def _note_prefix(self, request_id: str, tokens: int) -> None:
        """Note how much of a prompt was there; the engine's thread calls this."""
        request = self._requests.get(request_id)
        if request is not None and request.last_token is None:  # or it was resumed
            request.cached_tokens = tokens

    def _note_token(self, state: Any) -> None:
        """Note a new token; the engine's thread calls this."""
        request = self._requests.get(state.request_id)
        if request is not None:
            self._latencies.note_token(request, state)

    def grammars(self, tokenizer: Any) -> Grammars:
        """Return what compiles the grammars of requests, once the engine has begun."""
        return Grammars(tokenizer, self.vocabulary, why_unavailable(self._cb.batch_processor))

    def init_cb(self, model: Any, gen_config: Any) -> None:
        """Do nothing: a handler calls this for every request, and the engine already runs."""

    def is_alive(self) -> bool:
        """Return whether the engine's thread runs."""
        return self._cb is not None and self._cb.is_running() and super().is_alive()

    def why_dead(self) -> str | None:
        """Return what stopped the engine's thread."""
        error = None if self._cb is None else self._cb.background_thread_status.fatal_error
        return None if error is None else str(error)

    def usage(self) -> Usage | None:
        """Return what the pages hold."""
        return usage(self.model) if self.is_alive() else None

    def active(self) -> int:
        """Return the number of requests in steps, also of clients that have just gone."""
        processor = None if self._cb is None else self._cb.batch_processor
        return 0 if processor is None else len(processor.scheduler.active_requests)

    def waiting(self) -> int:
        """Return the number of requests that have not had a step."""
        # A request that is done is still being sent: it waits for nothing.
        unanswered = sum(not request.done for request in list(self.tracker.running))
        return max(unanswered - self.active(), 0)

    def stop(self) -> None:
        """End the engine's thread; requests that still run fail. Do nothing the second time."""
        cb, self.stopping = self._cb, True
        if cb is not None and cb._generation_thread is not None:
            cb.stop(block=True, timeout=_STOP_SECONDS, hard_stop=True)
            if cb.is_running():
                logger.error("the engine's thread did not end within %g s", _STOP_SECONDS)

    @property
    def max_tokens(self) -> int:
        """Tokens that one request may have, in the pages and for the model."""
        return min(self.page_tokens, self.model_tokens or self.page_tokens)

    # -- what the handlers call, in a thread ------------------------------------------------------

    def generate_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str,
        response_parser: Any = None,
    ) -> tuple[asyncio.Queue[Any], CBStreamer]:  # fmt: skip
        """Return a queue of the texts of an answer, and what cancels it; see the base class.

        `gen_config.max_new_tokens` becomes what the request gets; `request_id` is not used, since
        the engine has its own. Raises APIError: the request is too long, or the engine is not up.
        """
        request = current_request.get()
        answer = self._stream(request, processor, inputs["input_ids"], gen_config, response_parser)
        return asyncio.run_coroutine_threadsafe(answer, request.loop).result()

    async def _stream(
        self, request: ServerRequest, processor: Any, prompt: list[int], config: Any, parser: Any
    ) -> tuple[asyncio.Queue[Any], CBStreamer]:
        self._set_limit(request, prompt, config)
        stops = self._stops(request, processor)

        def on_stop() -> None:
            config.max_new_tokens = None  # the handlers would take its last token for the end
            request.close()

        queue = StoppingQueue(stops, on_stop) if stops else asyncio.Queue()
        tokenizer = _inner_tokenizer(processor)
        streamer = CBStreamer(
            self._cb, request.id, tokenizer, request.loop, queue, response_parser=parser
        )

        def on_error(error: APIError) -> None:
            request.error = error  # the handlers' own event for it is replaced by `adapt`
            queue.put_nowait(_StreamError(error.message))

        def on_output(output: Any) -> None:
            before = streamer.total_tokens
            try:
                streamer.put(output)
                self.tracker.new_tokens += streamer.total_tokens - before
                if request.done:
                    return
                if output.error is not None:
                    request.finish()
                    on_error(self._output_error(request, output))
                elif output.is_finished():
                    _note_end(request, config, output.generated_tokens)
                    self._latencies.note_end(request)
                    request.finish()
                    streamer.end()
            except Exception as error:
                logger.exception("an answer could not be turned into text")
                request.fail(APIError(500, str(error)))

        self._submit(request, prompt, config, on_output, on_error, streaming=True)
        return queue, streamer

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
        stops = self._stops(request, processor)
        finder = StopFinder(stops, _inner_tokenizer(processor))

        def on_output(output: Any) -> None:
            if future.done():
                return
            if output.error is not None:
                request.finish()
                on_error(self._output_error(request, output))
                return
            tokens = list(output.generated_tokens)
            finished = output.is_finished()
            if not finished and not finder.has_stop(tokens):
                return
            text = processor.decode(tokens, skip_special_tokens=True)
            end = find_stop(text, stops)
            if end is not None:
                gen_config.max_new_tokens = None  # as in `_stream`
                request.close()
            elif finished:
                _note_end(request, gen_config, tokens)
                self._latencies.note_end(request)
                request.finish()
            else:
                return
            self.tracker.new_tokens += len(tokens)
            future.set_result((text[:end], len(prompt), tokens))

        def on_error(error: APIError) -> None:
            if not future.done():
                future.set_exception(error)

        self._submit(request, prompt, gen_config, on_output, on_error, streaming=bool(stops))
        answer: tuple[str, int, list[int]] = await future
        return answer

    # -- one request ------------------------------------------------------------------------------

    def _set_limit(self, request: ServerRequest, prompt: list[int], gen_config: Any) -> None:
        """Set `max_new_tokens`, or raise APIError if the request cannot be answered."""
        if request.done or self.stopping or not self.is_alive():
            raise self._stopping_error()
        if not prompt:
            raise APIError(400, "expected a prompt of at least one token, got none")
        # The last token is part of the answer, and never stored.
        room, holder = self.page_tokens + 1 - len(prompt), f"the pages hold {self.page_tokens}"
        if self.model_tokens is not None and self.model_tokens - len(prompt) < room:
            room, holder = self.model_tokens - len(prompt), f"the model holds {self.model_tokens}"
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
        gen_config.max_new_tokens = wanted

    def _stops(self, request: ServerRequest, processor: Any) -> tuple[str, ...]:
        """Return the texts that end an answer. Raises APIError where they cannot be recognized."""
        stops = request_stops(request.body)
        if stops and get_response_template(processor, self.model) is not None:
            raise APIError(
                400,
                "stop: not supported for this model, whose answers are parsed from tokens; leave "
                "it out",
                param="stop",
                code="unsupported_parameter",
            )
        return stops

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
        added = cb.add_request(
            prompt,
            request_id=request.id,
            max_new_tokens=gen_config.max_new_tokens,
            streaming=streaming,
            eos_token_id=gen_config.eos_token_id,
            **({} if request.guide is None else {GUIDE: request.guide}),
            **request_sampling(
                request.body, gen_config, self.vocabulary, self._seeds.getrandbits(63)
            ),
        )
        if added is None:
            request.close()
            raise self._stopping_error()
        self.tracker.prompt_tokens += len(prompt)


class SingleEngineState(GenerationState):
    """The state in which the handlers look their engine up: there is one, for the one model."""

    def __init__(self, engine: Engine, *, compile: bool) -> None:
        super().__init__(continuous_batching=True, compile=compile)
        self.engine = engine

    def get_manager(self, model_id: str, use_cb: bool = False) -> Engine:
        """Return the engine."""
        if not use_cb:
            raise APIError(400, f"{model_id}: this server answers with continuous batching only")
        return self.engine

    def is_cb_alive(self) -> bool:
        """Return whether the engine's thread runs."""
        return self.engine.is_alive()

    def shutdown(self) -> None:
        """End the engine's thread."""
        self.engine.stop()


def _inner_tokenizer(processor: Any) -> Any:
    return getattr(processor, "tokenizer", processor)._tokenizer


def _note_end(request: ServerRequest, gen_config: Any, tokens: list[int]) -> None:
    """Tell an answer that was truncated from one that ended by itself with its last token."""
    ends, guide = gen_config.eos_token_id, request.guide
    ended = bool(tokens) and tokens[-1] in (ends if isinstance(ends, list) else [ends])
    if ended or (guide is not None and guide.is_whole(tokens)):
        gen_config.max_new_tokens = None
    else:
        request.truncated = True
