"""The engine behind the server: one model, continuous batching, started before the first request.

It takes the place of transformers' `CBGenerateManager`, which is made for one well-meaning client:
there the first request decides how all others are sampled, one that is longer than the pages stops
the engine, and one whose client has gone runs to its end unless it was streaming.
"""

import asyncio
import json
import logging
import time
from collections.abc import Callable
from typing import Any

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
from .errors import APIError
from .handlers import on_the_loop
from .requests import RequestTracker, ServerRequest, current_request
from .sampling import per_request_sampling, wanted_sampling
from .stop_strings import StoppingQueue, first_stop, wanted_stops

__all__ = ["Engine", "SingleEngineState"]

logger = logging.getLogger(__name__)

_START_SECONDS = 600.0
_STOP_SECONDS = 30.0
# How many new tokens a request gets that does not say.
_NEW_TOKENS = 1024
_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")


class Engine(CBGenerateManager):
    """Answers requests of one model from FP8 pages; of its methods the handlers call `generate_*`.

    Args:
        model: a causal language model that `hf_fp8kv.serving.enable` was called on.
        config: a ContinuousBatchingConfig, or None for transformers' own defaults.
        calls: the server's requests.

    Attributes:
        page_tokens: tokens that one request may hold in the pages.
        model_tokens: tokens that the model was made for; None: unknown.
        room: the smaller of the two.
    """

    def __init__(self, model: Any, config: Any, calls: RequestTracker) -> None:
        super().__init__(cb_config=config)
        self._cb: Any = None
        self.model, self.calls = model, calls
        self.vocabulary = int(model.config.get_text_config().vocab_size)
        self.page_tokens = 0
        self.model_tokens = _model_tokens(model)
        self.stopping = False

    def begin(self) -> None:
        """Starts the engine's thread, and returns when its pages are there.

        Raises:
            ConfigError: it does not start, or its pages hold no token.
        """
        config: dict[str, Any] = self.model.generation_config.to_dict()
        sampling = {"do_sample": True, "temperature": 0.7, "use_cache": False}
        cb = self.model.init_continuous_batching(
            generation_config=GenerationConfig(**{**config, **sampling}),
            continuous_batching_config=self._cb_config,
        )
        per_request_sampling(cb, self.vocabulary)
        self._cb = cb
        cb.start()
        until = time.monotonic() + _START_SECONDS
        while cb.batch_processor is None:
            error = cb.background_thread_status.fatal_error
            if error is not None or not cb.is_running() or time.monotonic() > until:
                self.stop()
                raise ConfigError(
                    f"expected an engine for continuous batching, got: {error or 'no answer'}; "
                    "--cb-num-blocks and --cb-max-batch-tokens make it smaller"
                ) from error
            time.sleep(0.01)
        self.page_tokens = cb.batch_processor.cache.request_tokens()
        if self.page_tokens < 2:
            self.stop()
            raise ConfigError(
                f"expected pages for some tokens, got {self.page_tokens}; pass a larger "
                "--cb-num-blocks"
            )

    def init_cb(self, model: Any, gen_config: Any) -> None:
        """Called by a handler for every request: there is nothing left to be made."""

    def is_alive(self) -> bool:
        """Whether its thread runs."""
        return self._cb is not None and self._cb.is_running() and super().is_alive()

    def why_dead(self) -> str | None:
        """Returns what stopped its thread."""
        error = None if self._cb is None else self._cb.background_thread_status.fatal_error
        return None if error is None else str(error)

    def usage(self) -> Usage | None:
        """Returns what its pages hold."""
        return usage(self.model) if self.is_alive() else None

    def active(self) -> int:
        """Returns the requests that it has begun with, also those whose client has just gone."""
        processor = None if self._cb is None else self._cb.batch_processor
        return 0 if processor is None else len(processor.scheduler.active_requests)

    def waiting(self) -> int:
        """Returns the requests that it has not begun with."""
        # What is over is still being sent: it is in nobody's way.
        unanswered = sum(not call.over for call in list(self.calls.running))
        return max(unanswered - self.active(), 0)

    def stop(self) -> None:
        """Ends its thread; requests that still run fail. Does nothing the second time."""
        cb, self.stopping = self._cb, True
        if cb is not None and cb._generation_thread is not None:
            cb.stop(block=True, timeout=_STOP_SECONDS, hard_stop=True)
            if cb.is_running():
                logger.error("the engine's thread did not end within %g s", _STOP_SECONDS)

    @property
    def room(self) -> int:
        return min(self.page_tokens, self.model_tokens or self.page_tokens)

    # -- what the handlers call, in a thread ------------------------------------------------------

    def generate_streaming(
        self,
        model: Any,
        processor: Any,
        inputs: Any,
        gen_config: Any,
        request_id: str,
        response_parser: Any = None,
    ) -> tuple[asyncio.Queue[Any], CBStreamer]:
        """Returns a queue of the texts of an answer, and what cancels it.

        Args:
            model: the engine's.
            processor: its tokenizer.
            inputs: `input_ids`, a list of the prompt's tokens.
            gen_config: the request's GenerationConfig; its `max_new_tokens` becomes what it gets.
            request_id: the client's name of it; the engine has its own.
            response_parser: see CBStreamer.

        Raises:
            APIError: the request is too long, or the engine does not run.
        """
        call = _current_request()
        return on_the_loop(
            call.loop,
            lambda: self._stream(call, processor, inputs["input_ids"], gen_config, response_parser),
        )

    def _stream(
        self,
        call: ServerRequest,
        processor: Any,
        prompt: list[int],
        gen_config: Any,
        response_parser: Any,
    ) -> tuple[asyncio.Queue[Any], CBStreamer]:
        self._admit(call, prompt, gen_config)
        stops = self._stops(call, processor)

        def stopped() -> None:
            gen_config.max_new_tokens = None  # the handlers would take its last token for the end
            call.close()

        queue = StoppingQueue(stops, stopped) if stops else asyncio.Queue()
        tokenizer = getattr(processor, "tokenizer", processor)._tokenizer
        streamer = CBStreamer(
            self._cb,
            call.id,
            tokenizer,
            asyncio.get_running_loop(),
            queue,
            response_parser=response_parser,
        )

        def fail(error: object) -> None:
            # The handlers put it into JSON between quotes as it is.
            queue.put_nowait(_StreamError(json.dumps(str(error))[1:-1]))

        def deliver(output: Any) -> None:
            before = streamer.total_tokens
            try:
                streamer.put(output)
                self.calls.new_tokens += streamer.total_tokens - before
                if call.over:
                    return
                if output.error is not None:
                    call.finish()
                    fail(output.error)
                elif output.is_finished():
                    _note_end(call, gen_config, output.generated_tokens)
                    call.finish()
                    streamer.end()
            except Exception as error:
                logger.exception("an answer could not be turned into text")
                call.fail(error)

        self._submit(call, prompt, gen_config, deliver, fail, streaming=True)
        return queue, streamer

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str
    ) -> tuple[str, int, list[int]]:
        """Returns the answer's text, the number of the prompt's tokens, and the new tokens.

        Args: see `generate_streaming`.

        Raises:
            APIError: the request is too long, or the engine does not run, or stopped meanwhile.
        """
        await asyncio.sleep(0)  # what follows is on the event loop
        call, prompt = _current_request(), inputs["input_ids"]
        self._admit(call, prompt, gen_config)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        stops = self._stops(call, processor)

        def deliver(output: Any) -> None:
            if future.done():
                return
            if output.error is not None:
                call.finish()
                fail(APIError(503 if not self.is_alive() else 500, str(output.error)))
                return
            tokens = list(output.generated_tokens)
            finished = output.is_finished()
            # Asked after every token only where a text may end the answer.
            text = processor.decode(tokens, skip_special_tokens=True) if stops or finished else ""
            at = first_stop(text, stops)
            if at is not None:
                gen_config.max_new_tokens = None  # as in `_stream`
                call.close()
            elif finished:
                _note_end(call, gen_config, tokens)
                call.finish()
            else:
                return
            self.calls.new_tokens += len(tokens)
            future.set_result((text[:at], len(prompt), tokens))

        def fail(error: Exception) -> None:
            if not future.done():
                future.set_exception(error)

        self._submit(call, prompt, gen_config, deliver, fail, streaming=bool(stops))
        answer: tuple[str, int, list[int]] = await future
        return answer

    # -- one request ------------------------------------------------------------------------------

    def _admit(self, call: ServerRequest, prompt: list[int], gen_config: Any) -> None:
        """Raises APIError if it cannot be answered; else `max_new_tokens` is then what it gets."""
        if call.over:
            raise APIError(503, "the server is stopping", code="stopping")
        if self.stopping or not self.is_alive():
            raise APIError(503, self.why_dead() or "the server is stopping", code="stopping")
        if not prompt:
            raise APIError(400, "expected a prompt of some tokens, got one without any")
        # The last token is answered with, and never stored.
        room, holder = self.page_tokens + 1 - len(prompt), f"the pages hold {self.page_tokens}"
        if self.model_tokens is not None and self.model_tokens - len(prompt) < room:
            room, holder = self.model_tokens - len(prompt), f"the model holds {self.model_tokens}"
        asked = next((name for name in _LIMITS if name in call.body), None)
        own = "generation_config" in call.body and gen_config.max_new_tokens is not None
        wanted = gen_config.max_new_tokens if asked or own else min(_NEW_TOKENS, room)
        if room < 1 or wanted > room:
            raise APIError(
                400,
                f"expected a prompt and new tokens that fit, got {len(prompt)} tokens and "
                f"{max(wanted, 1)} new ones, and {holder}; send less, or ask for less",
                param=asked,
                code="context_length_exceeded",
            )
        gen_config.max_new_tokens = wanted

    def _stops(self, call: ServerRequest, processor: Any) -> tuple[str, ...]:
        """Returns the texts that end an answer. Raises APIError where they cannot be told."""
        stops = wanted_stops(call.body)
        if stops and get_response_template(processor, self.model) is not None:
            raise APIError(
                400,
                "stop: expected it left out, since this model's answers have parts that are read "
                "from its tokens",
                param="stop",
                code="unsupported_parameter",
            )
        return stops

    def _submit(
        self,
        call: ServerRequest,
        prompt: list[int],
        gen_config: Any,
        deliver: Callable[[Any], None],
        fail: Callable[[Exception], None],
        *,
        streaming: bool,
    ) -> None:
        """Hands a request to the engine, whose outputs then arrive on the event loop."""
        cb = self._cb

        def cancel() -> None:
            with cb.output_router._lock:
                cb.output_router.result_handlers.pop(call.id, None)
            cb.cancel_request(call.id)

        # First: an output that nobody takes is kept for ever.
        cb.register_result_handler(call.id, deliver)
        call.begin(cancel=cancel, fail=fail)
        added = cb.add_request(
            prompt,
            request_id=call.id,
            max_new_tokens=gen_config.max_new_tokens,
            streaming=streaming,
            eos_token_id=gen_config.eos_token_id,
            **wanted_sampling(call.body, gen_config, self.vocabulary),
        )
        if added is None:
            call.close()
            raise APIError(503, self.why_dead() or "the server is stopping", code="stopping")
        self.calls.prompt_tokens += len(prompt)


class SingleEngineState(GenerationState):
    """What the handlers look their engine up in: there is one, for the one model."""

    def __init__(self, engine: Engine, *, compile: bool) -> None:
        super().__init__(continuous_batching=True, compile=compile)
        self.engine = engine

    def get_manager(self, model_id: str, use_cb: bool = False) -> Engine:
        """Returns the engine."""
        if not use_cb:
            raise APIError(400, f"{model_id}: this server answers with continuous batching only")
        return self.engine

    def is_cb_alive(self) -> bool:
        """Whether the engine's thread runs."""
        return self.engine.is_alive()

    def shutdown(self) -> None:
        """Ends the engine's thread."""
        self.engine.stop()


def _current_request() -> ServerRequest:
    call = current_request.get()
    if call is None:
        raise RuntimeError("expected a request that came through the gate")
    return call


def _note_end(call: ServerRequest, gen_config: Any, tokens: list[int]) -> None:
    """Tells an answer that was cut from one that ended by itself with the last token it had."""
    ends = gen_config.eos_token_id
    if tokens and tokens[-1] in (ends if isinstance(ends, list) else [ends]):
        gen_config.max_new_tokens = None
    else:
        call.cut = True


def _model_tokens(model: Any) -> int | None:
    """Returns the tokens that the model was made for; None where its config does not say."""
    found = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return found if isinstance(found, int) and found > 0 else None
