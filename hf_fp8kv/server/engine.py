"""The adapter to transformers' engine: submit a request, stream its tokens, cancel it.

Only this file and scheduling.py use the engine. Private names of transformers that are used:
`ModelRunner._sample` here, `Scheduler._process_candidates` and `._schedule_request` there.
"""

import asyncio
import dataclasses
import logging
import queue
import time
import uuid
from collections.abc import AsyncGenerator, Iterable
from types import MethodType
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation.continuous_batching.requests import RequestStatus

from ..errors import ConfigError
from ..serving import Usage, usage
from .errors import STOPPING, APIError, field_error
from .metrics import Metrics
from .sampling import SEQUENCE, Sampler, Sequence, wants_prompt
from .scheduling import share_steps

logger = logging.getLogger(__name__)

_STOP_SECONDS = 30.0
# Tokens of a step on a CPU. With transformers' 8,192 all streams would pause for minutes while one
# prompt is read. Shorter steps read the weights more often, which costs little from some hundred
# tokens on.
_CPU_STEP_TOKENS = 256


class Engine:
    """The running engine of one model, which `hf_fp8kv.serving.enable` was called on.

    Args:
        model: The model.
        batching: A ContinuousBatchingConfig. On a CPU its steps have 256 tokens by default.
        metrics: Metrics that count each token.
        max_model_tokens: Maximum number of tokens of a prompt and its answer. None means the
            model's own maximum.

    Raises:
        ConfigError: The engine has no pages, or cannot run the model with this configuration.
    """

    def __init__(
        self, model: Any, batching: Any, metrics: Metrics, max_model_tokens: int | None = None
    ) -> None:
        self.model, self._metrics = model, metrics
        text = model.config.get_text_config()
        self.vocabulary = int(text.vocab_size)
        limit = getattr(text, "max_position_embeddings", None)
        limits = [n for n in (limit, max_model_tokens) if isinstance(n, int) and n > 0]
        self.model_tokens = min(limits, default=None)  # of a prompt and its answer
        self.prompt_tokens = self.new_tokens = 0  # since the start
        # Why the host cannot change or read the logits of one request. None means that it can.
        self.fixed_steps: str | None = None
        if model.device.type == "cpu" and batching.max_batch_tokens is None:
            batching = dataclasses.replace(batching, max_batch_tokens=_CPU_STEP_TOKENS)
        # The planner leaves memory for logits processors if the configuration samples.
        config = model.generation_config.to_dict() | {"do_sample": True, "temperature": 0.7}
        manager = model.init_continuous_batching(
            generation_config=GenerationConfig(**config | {"use_cache": False}),
            continuous_batching_config=batching,
        )
        # Requests have their own temperature, top-k and so on. The model's are "warpers".
        kept = [
            processor
            for processor in manager.logit_processor.logits_processor
            if not type(processor).__name__.endswith("LogitsWarper")
        ]
        manager.logit_processor = sampler = Sampler(kept, self.vocabulary)
        manager.on_processor = lambda processor: self._prepare(processor, sampler)
        manager.output_router.output_queue = _Discard()
        self._manager: Any = manager  # None after `stop`
        self._status = manager.background_thread_status
        self._hooks = [
            model.register_forward_pre_hook(sampler.request_scores, with_kwargs=True),
            model.register_forward_hook(sampler.take_scores, with_kwargs=True),
        ]
        try:
            manager.warmup()  # allocates the pages
            self.page_tokens: int = manager.batch_processor.cache.max_request_tokens()
            if self.page_tokens < 2:
                raise ValueError(f"pages for {self.page_tokens} tokens of a request")
            manager.start()
        except BaseException as error:
            self.stop()
            if not isinstance(error, Exception):
                raise
            raise ConfigError(
                f"expected an engine for continuous batching, got: {error}; change "
                "--cb-num-blocks or --cb-max-batch-tokens"
            ) from error

    def stop(self) -> None:
        """End the engine's thread, if it runs. Requests that still run fail."""
        manager, self._manager = self._manager, None
        if manager is None:
            return
        manager.stop(block=True, timeout=_STOP_SECONDS, hard_stop=True)
        for hook in self._hooks:
            hook.remove()
        if manager.is_running():
            logger.error("the engine's thread did not end within %g s", _STOP_SECONDS)

    # -- state -----------------------------------------------------------------------------------

    @property
    def max_tokens(self) -> int:
        """Maximum number of tokens of one request, in the pages and for the model."""
        return min(self.page_tokens, self.model_tokens or self.page_tokens)

    @property
    def failure(self) -> str | None:
        """The error that ended the engine's thread. None means that it has not failed."""
        error = self._status.fatal_error
        return None if error is None else str(error)

    def is_alive(self) -> bool:
        """Return whether the engine's thread runs and takes requests."""
        manager = self._manager
        return manager is not None and manager.is_running() and self.failure is None

    def usage(self) -> Usage | None:
        """Return the usage of the pages, or None if the engine does not run."""
        return usage(self.model) if self.is_alive() else None

    def active(self) -> int:
        """Return the number of requests in steps, including those just cancelled."""
        processor = None if self._manager is None else self._manager.batch_processor
        return 0 if processor is None else len(processor.scheduler.active_requests)

    # -- requests --------------------------------------------------------------------------------

    async def stream(
        self, sequence: Sequence, *, each_token: bool
    ) -> AsyncGenerator[list[int], None]:
        """Yield the new tokens of an answer as they come, or all of them at its end.

        Close the generator early to cancel the request. Its pages are free after the current step.

        Raises:
            APIError: The engine does not take the request, or cannot finish it.
        """
        if not self.is_alive():
            raise APIError(503, self.failure or STOPPING, code="stopping")
        manager, name, seen, ended = self._manager, uuid.uuid4().hex, 0, False
        outputs: asyncio.Queue[Any] = asyncio.Queue()
        # Before the request, because an output without a handler is lost.
        manager.register_result_handler(name, outputs.put_nowait)
        sequence.submitted_at = time.perf_counter()
        try:
            added = manager.add_request(
                sequence.prompt,
                request_id=name,
                max_new_tokens=sequence.max_new_tokens,
                streaming=each_token,
                # An engine would replace an empty list by its own ends.
                eos_token_id=sorted(sequence.ends) or [-1],
                **{SEQUENCE: sequence},
            )
            if added is None:
                raise APIError(503, self.failure or STOPPING, code="stopping")
            self.prompt_tokens += len(sequence.prompt)
            while not ended:
                output = await outputs.get()
                while not outputs.empty():  # the last output has all tokens
                    output = outputs.get_nowait()
                ended = output.is_finished()
                if output.error is not None:
                    status = 500 if self.is_alive() else 503
                    raise sequence.error or APIError(status, str(output.error))
                new = output.generated_tokens[seen:]
                seen += len(new)
                self.new_tokens += len(new)
                yield new
        finally:
            if not ended:
                manager.output_router.result_handlers.pop(name, None)
                manager.cancel_request(name)

    # -- the engine's thread calls these ---------------------------------------------------------

    def _prepare(self, processor: Any, sampler: Sampler) -> None:
        """Make a new batch processor choose tokens by each request's Sequence."""
        self.fixed_steps = why_fixed(processor)
        tensors, vocabulary = processor.inputs_and_outputs, self.vocabulary

        def sample(_: Any, scores: torch.Tensor, output_ids: torch.Tensor) -> None:
            best, tokens = scores[0].max(-1)
            failed = best.isfinite().logical_not_()
            output_ids[0, : len(tokens)] = tokens + failed * vocabulary

        # Private: a row without finite logits gets a token past the vocabulary, so that only its
        # request fails. No public part of the engine has both logits and tokens.
        processor.model_runner._sample = MethodType(sample, processor.model_runner)
        finish_step = tensors.prepare_batch_update

        def prepare_batch_update() -> tuple[list[Any], list[int], None]:
            requests, tokens, _ = finish_step()
            return (*self._take_tokens(processor, sampler, requests, tokens), None)

        tensors.prepare_batch_update = prepare_batch_update
        if processor.use_async_batching:  # a step reads the previous step's tokens on the device
            carry_over = tensors.carry_over_tokens

            def carry_over_tokens(input_ids: torch.Tensor, *args: torch.Tensor) -> None:
                carry_over(input_ids, *args)
                input_ids.remainder_(vocabulary)

            tensors.carry_over_tokens = carry_over_tokens
        share_steps(processor.scheduler)
        find = processor.cache.search_prefix_match

        def search_prefix_match(request_id: str, prompt_ids: list[int]) -> int:
            state = processor.scheduler.waiting_requests[request_id]
            if wants_prompt(state):
                return 0  # tokens of a prefix are not computed, so they would have no logits
            tokens = int(find(request_id, prompt_ids))
            sequence: Sequence = state.logit_processor_kwargs[SEQUENCE]
            if sequence.last_token_at is None:  # not a resumed request
                sequence.cached_tokens = tokens
            return tokens

        processor.cache.search_prefix_match = search_prefix_match

    def _take_tokens(
        self, processor: Any, sampler: Sampler, requests: list[Any], tokens: Iterable[int]
    ) -> tuple[list[Any], list[int]]:
        """Record the tokens of a step. Return the requests that continue, and their tokens."""
        kept, kept_tokens, rows = [], [], enumerate(tokens)
        for request in requests:
            row, token = next(rows) if request.has_new_token else (None, None)
            state = request.state
            if state.error is not None:  # it was ended while this step ran
                continue
            if row is None or token is None:
                kept.append(request)
                continue
            sequence: Sequence = state.logit_processor_kwargs[SEQUENCE]
            try:
                check_token(sequence, token, self.vocabulary)
                sampler.record(row, token)
                sequence.answer.append(token)
                self._metrics.note_token(sequence, state.lifespan[0])
                if not _is_complete(sequence, self.vocabulary):
                    kept.append(request)
                    kept_tokens.append(token)
                    continue
                # The model has no token that could end the complete text.
                state.generated_tokens.append(token)
                state.status = RequestStatus.FINISHED
                processor.output_router.deliver(state.to_generation_output())
            except APIError as error:
                sequence.error = error
                processor.output_router.fail_and_deliver(state, error)
            processor.scheduler.finish_request(state.request_id)
            processor.scheduler.block_new_requests = False
        return kept, kept_tokens


def _is_complete(sequence: Sequence, vocabulary: int) -> bool:
    """Return whether the text is complete and the model has no token that ends an answer."""
    return (
        sequence.guide is not None
        and sequence.guide.complete
        and not any(end < vocabulary for end in sequence.ends)
    )


def check_token(sequence: Sequence, token: int, vocabulary: int) -> None:
    """Continue a request's grammar with a token. Raises APIError if the request fails."""
    guide, rules = sequence.guide, sequence.rules
    if token < vocabulary:
        if guide is not None and token not in sequence.ends:
            guide.accept(token)
        return
    if guide is not None and (rules.bad_words or rules.min_tokens):
        text = "bad_words or min_tokens remove every token that may follow"
        raise field_error(guide.field, text)
    place, why = len(sequence.prompt) + len(sequence.answer), ""
    if guide is not None or rules:
        why = "logit_bias, bad_words, min_tokens and the answer's form leave none, or "
    raise APIError(
        500,
        f"expected finite logits, got none for token {place}: {why}the model overflows on this "
        "prompt, or with these weights and dtype",
    )


def why_fixed(processor: Any) -> str | None:
    """Return why requests cannot change the steps of a batch processor, or None if they can."""
    if processor.use_async_batching:
        return "asynchronous batching begins a step before the last token is known"
    if getattr(processor.model_runner, "pad_inputs", False):
        return "CUDA graphs and compiled steps cannot change with a request"
    return None


class _Discard(queue.SimpleQueue[Any]):
    """A queue for outputs whose clients have left."""

    def put(self, *_: Any, **__: Any) -> None:
        """Keep nothing."""
