"""The server's engine: one model, continuous batching, started before the first request.

It takes the place of transformers' `CBGenerateManager`, which is made for one well-behaved client:
there the first request decides how all others are sampled, one that is longer than the pages stops
the engine, and one whose client has gone runs to its end unless it was streaming.
"""

import contextlib
import functools
import logging
import queue
import time
from typing import Any

from transformers import GenerationConfig
from transformers.cli.serving.utils import GenerationState

from ...errors import ConfigError
from .. import Usage, usage
from .errors import APIError
from .generation import Generation
from .grammars import Grammars, why_unavailable
from .latencies import Latencies
from .logits import LogprobRecorder, score_prompts, wants_prompt
from .requests import RequestTracker
from .sampling import isolate_rows, per_request_sampling
from .scheduling import share_steps

logger = logging.getLogger(__name__)

_START_SECONDS = 600.0
_STOP_SECONDS = 30.0


class Engine(Generation):
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
        super().__init__(config, tracker, latencies, seed)
        self.model = model
        text = model.config.get_text_config()
        self.vocabulary = int(text.vocab_size)
        self.page_tokens = 0  # that one request may hold
        limit = getattr(text, "max_position_embeddings", None)
        self.model_tokens = limit if isinstance(limit, int) and limit > 0 else None
        if max_model_tokens is not None:
            self.model_tokens = min(max_model_tokens, self.model_tokens or max_model_tokens)
        self.stopping = False
        # Why the host cannot change or read the logits of one request; None: it can.
        self.fixed_steps: str | None = None

    def begin(self) -> None:
        """Start the engine, and return when its pages are there; raise ConfigError without them."""
        config: dict[str, Any] = self.model.generation_config.to_dict()
        sampling = {"do_sample": True, "temperature": 0.7, "use_cache": False}
        cb = self.model.init_continuous_batching(
            generation_config=GenerationConfig(**{**config, **sampling}),
            continuous_batching_config=self._cb_config,
        )
        recorder = per_request_sampling(cb, self.vocabulary)
        # Before the first step: other processes may ask for it before this one returns here.
        create = cb._create_batch_processor
        cb._create_batch_processor = lambda: self._prepare(cb, create(), recorder)
        self._cb = cb
        cb.output_router.output_queue = _Discard()
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
        self.page_tokens = cb.batch_processor.cache.max_request_tokens()
        if self.page_tokens < 2:
            self.stop()
            raise ConfigError(
                f"expected pages for some tokens, got {self.page_tokens}; pass a larger "
                "--cb-num-blocks"
            )

    def _prepare(self, cb: Any, processor: Any, recorder: LogprobRecorder) -> Any:
        """Make a new batch processor ours; the engine's thread calls this."""
        self.fixed_steps = why_unavailable(processor)
        isolate_rows(processor, self.vocabulary, recorder, self._note_token)
        if self.fixed_steps is None:
            score_prompts(processor)
        share_steps(processor.scheduler)
        processor.cache.on_prefix = self._note_prefix
        processor.cache.takes_prefix = functools.partial(_takes_prefix, processor.scheduler)
        return processor

    def _note_prefix(self, request_id: str, tokens: int) -> None:
        """Note how much of a prompt was there; the engine's thread calls this."""
        request = self._requests.get(request_id)
        if request is not None and request.last_token is None:  # or it was resumed
            request.cached_tokens = tokens

    def _note_token(self, state: Any) -> None:
        """Note a new token; the engine's thread calls this."""
        request = self._requests.get(state.request_id)
        if request is not None:
            if request.last_token is None and request.first_token is not None:
                with contextlib.suppress(RuntimeError):  # the loop has ended
                    request.loop.call_soon_threadsafe(request.first_token.set)
            self._latencies.note_token(request, state)

    def grammars(self, tokenizer: Any) -> Grammars:
        """Return what compiles the grammars of requests, once the engine has begun."""
        return Grammars(tokenizer, self.vocabulary, self.fixed_steps)

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


def _takes_prefix(scheduler: Any, request_id: str) -> bool:
    """Return whether a request may find its beginning in the pages; the same in all processes."""
    queues = scheduler.waiting_requests, scheduler.active_requests
    state = next((queue[request_id] for queue in queues if request_id in queue), None)
    # What is found is not computed: it has no logits.
    return state is None or not wants_prompt(state)


class _Discard(queue.SimpleQueue[Any]):
    """Where outputs of requests go whose clients have gone: nobody would ever take them."""

    def put(self, *_: Any, **__: Any) -> None:
        """Keep nothing."""


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
