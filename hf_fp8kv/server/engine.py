"""The adapter to transformers' engine: submit a request, stream its tokens, cancel it.

Only this file uses the engine. It replaces four attributes of transformers' objects:
`ContinuousBatchingManager.logit_processor`, `ModelRunner._sample`, and two methods of
`ContinuousBatchingIOs`, `prepare_batch_update` and `carry_over_tokens`.
"""

import asyncio
import dataclasses
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Iterable
from types import MethodType
from typing import Any

import psutil
import torch
from transformers import GenerationConfig
from transformers.generation.continuous_batching.requests import RequestStatus

from ..cache.cache import FP8PagedCache
from ..errors import ConfigError
from ..formats import list_counts
from ..serving import Usage, read_usage
from ..utils.terminal import format_size
from .errors import APIError, make_field_error, make_stopping_error
from .metrics import Metrics
from .sampling import SEQUENCE_KEY, Sampler, Sequence, TokenLogprob, make_logprobs

logger = logging.getLogger(__name__)

# Maximum number of tokens of a step on a CPU. With transformers' 8,192, all streams would pause for
# minutes while a prompt is computed. Short steps read the weights more often, which costs little.
_MAX_CPU_STEP_TOKENS = 256
# Memory for pages on a CPU if the configuration sets no limit. A model gets more if a
# request of `_MIN_CPU_TOKENS` tokens needs more. `_MAX_CPU_SHARE` of the memory is the maximum.
_CPU_MEMORY_BYTES = 4 * 2**30
_MAX_CPU_SHARE = 0.6
_MIN_CPU_TOKENS = 8192
# Number of tokens of a prompt that are scored between two steps of the engine. Each token has a
# logit for every token of the vocabulary.
_SCORING_CHUNK_TOKENS = 256


class Engine:
    """The running engine of one model.

    Args:
        model: A model on which `hf_fp8kv.serving.enable` was called.
        batching: A ContinuousBatchingConfig. On a CPU, a step has at most 256 tokens by default.
        metrics: Metrics that record each token.
        max_model_tokens: Maximum number of tokens of a prompt and its answer. None means the
            maximum of the model.

    Raises:
        ConfigError: The engine has no pages, or cannot run the model with this configuration.
    """

    def __init__(
        self, model: Any, batching: Any, metrics: Metrics, max_model_tokens: int | None = None
    ) -> None:
        self.model = model
        self._metrics = metrics
        text_config = model.config.get_text_config()
        self.vocab_size = int(text_config.vocab_size)
        self._scoring_lock = asyncio.Lock()  # one prompt is scored at a time
        self.num_prompt_tokens = 0  # since the start
        self.num_new_tokens = 0  # since the start
        is_on_cpu = model.device.type == "cpu"
        if is_on_cpu and batching.max_batch_tokens is None:
            batching = dataclasses.replace(batching, max_batch_tokens=_MAX_CPU_STEP_TOKENS)
        if is_on_cpu and batching.num_blocks is None and batching.max_memory_percent is None:
            memory_share = min(_compute_cpu_bytes(model) / _count_free_bytes(), _MAX_CPU_SHARE)
            batching = dataclasses.replace(batching, max_memory_percent=memory_share)
        # The engine reserves memory for logits processors only if the configuration samples.
        config = model.generation_config.to_dict() | {"do_sample": True, "temperature": 0.7}
        manager = model.init_continuous_batching(
            generation_config=GenerationConfig(**config | {"use_cache": False}),
            continuous_batching_config=batching,
        )
        # The model's warpers are dropped, because each request has a separate temperature etc.
        processors = [
            processor
            for processor in manager.logit_processor.logits_processor
            if not type(processor).__name__.endswith("LogitsWarper")
        ]
        manager.logit_processor = sampler = Sampler(processors, self.vocab_size)
        self._manager: Any = manager
        try:
            logger.info("allocating pages, and filling them with zeros")
            manager.allocate_pages()
            self._prepare_processor(manager.batch_processor, sampler)
            manager.warmup()
            max_stored_tokens: int = manager.max_request_tokens
            if max_stored_tokens < 2:
                raise ValueError(f"pages for {max_stored_tokens} tokens of a request")
            manager.start()
        except BaseException as error:
            self.stop(timeout=5.0)
            if not isinstance(error, Exception):
                raise
            raise ConfigError(
                f"cannot start the engine for continuous batching: {error}. Change "
                "--cb-num-blocks or --cb-max-batch-tokens"
            ) from error
        # Reason why the host cannot change or read the logits of a request. None means that it can.
        self.fixed_steps_reason = explain_fixed_steps(manager.batch_processor)
        # The last token of an answer is never stored.
        limits = (
            max_stored_tokens + 1,
            getattr(text_config, "max_position_embeddings", None),
            max_model_tokens,
        )
        # Maximum number of tokens of a prompt and its answer.
        self.max_tokens = min(limit for limit in limits if isinstance(limit, int) and limit > 0)
        usage = read_usage(manager)
        assert usage is not None  # `warmup` has allocated the pages
        num_tokens = usage.pages_total * manager.continuous_batching_config.page_size
        bf16_sizes = FP8PagedCache(model.config, dtype="model").count_bytes()
        bf16_tokens = int(usage.bytes_total / bf16_sizes[0]) if bf16_sizes else 0
        formats = list_counts(usage.plans)
        # The capacity of the pages in tokens, the same for bf16, and the formats.
        self.pages = {"tokens": num_tokens, "bf16_tokens": bf16_tokens, "formats": formats}
        logger.info(
            "pages: %s tokens in %s as %s (bf16: %s tokens), up to %s tokens of a request",
            f"{num_tokens:,}",
            format_size(usage.bytes_total),
            " + ".join(formats),
            f"{bf16_tokens:,}",
            f"{self.max_tokens:,}",
        )

    def stop(self, timeout: float) -> bool:
        """Stop the engine's thread. Unfinished requests fail. Return whether the thread ended.

        `timeout` limits the seconds that this waits for a running step.
        """
        self._manager.stop(block=True, timeout=timeout, hard_stop=True)
        is_running: bool = self._manager.is_running()
        if is_running:
            logger.error("the engine's thread did not end within %g s", timeout)
        return not is_running

    @property
    def failure(self) -> str | None:
        """The error that ended the engine's thread. None means that the thread has not failed."""
        error = self._manager.background_thread_status.fatal_error
        return None if error is None else str(error)

    def is_alive(self) -> bool:
        """Return whether the engine's thread runs and has not failed."""
        # A thread that fails refuses requests before it records its error.
        return self._manager.is_running() and self.failure is None

    def read_usage(self) -> Usage | None:
        """Return the usage of the pages, or None if the engine does not run."""
        return read_usage(self.model) if self.is_alive() else None

    def count_active(self) -> int:
        """Return the number of requests that hold pages. Requests that were just canceled count."""
        processor = self._manager.batch_processor
        return 0 if processor is None else len(processor.scheduler.active_requests)

    async def stream(
        self, sequence: Sequence, *, per_step: bool
    ) -> AsyncGenerator[list[int], None]:
        """Yield the new tokens of an answer after each step, or all of them after the last step.

        Close the generator early to cancel the request. Its pages are free after the current step.

        Raises:
            APIError: The engine does not accept the request, or cannot finish it.
        """
        self._require_alive()
        manager = self._manager
        request_id = uuid.uuid4().hex
        num_yielded = 0
        is_finished = False
        late_outputs = manager.output_router.output_queue
        while not late_outputs.empty():  # the clients of these requests have left
            late_outputs.get_nowait()
        outputs: asyncio.Queue[Any] = asyncio.Queue()
        # The handler is registered before the request, because outputs without a handler are lost.
        manager.register_result_handler(request_id, outputs.put_nowait)
        sequence.submitted_at = time.perf_counter()
        try:
            accepted_id = manager.add_request(
                sequence.prompt,
                request_id=request_id,
                max_new_tokens=sequence.max_new_tokens,
                streaming=per_step,
                # The engine would replace an empty list by the model's end tokens. No token is -1.
                eos_token_id=sorted(sequence.end_tokens) or [-1],
                cache_salt=sequence.cache_salt,
                **{SEQUENCE_KEY: sequence},
            )
            if accepted_id is None:
                raise make_stopping_error(self.failure)
            self.num_prompt_tokens += len(sequence.prompt)
            while not is_finished:
                output = await outputs.get()
                while not outputs.empty():  # the last output contains all tokens
                    output = outputs.get_nowait()
                is_finished = output.is_finished()
                if output.error is not None:
                    raise sequence.error or APIError(
                        500 if self.is_alive() else 503, str(output.error)
                    )
                new_tokens = output.generated_tokens[num_yielded:]
                num_yielded += len(new_tokens)
                self.num_new_tokens += len(new_tokens)
                yield new_tokens
        finally:
            if not is_finished:
                manager.output_router.result_handlers.pop(request_id, None)
                manager.cancel_request(request_id)

    def _require_alive(self) -> None:
        if not self.is_alive():
            raise make_stopping_error(self.failure)

    async def score_prompt(self, prompt: list[int], num_top: int) -> list[TokenLogprob]:
        """Return the log-probability of each token of a prompt, with `num_top` likely tokens.

        The model runs over the prompt between steps of the engine, with a cache that stores keys
        and values like the engine's pages. The first token has no log-probability.

        Raises:
            APIError: The engine does not run, or a logit is not a number.
        """
        logprobs = [TokenLogprob(prompt[0], None, ())]
        async with self._scoring_lock:
            self._require_alive()
            cache = self._manager.make_cache()
            for start in range(0, len(prompt) - 1, _SCORING_CHUNK_TOKENS):
                tokens = prompt[start : start + _SCORING_CHUNK_TOKENS + 1]
                logprobs += await asyncio.to_thread(self._score_tokens, cache, tokens, num_top)
        return logprobs

    @torch.no_grad()
    def _score_tokens(
        self, cache: FP8PagedCache, tokens: list[int], num_top: int
    ) -> list[TokenLogprob]:
        """Return the log-probabilities of the tokens after the first, which follow the cache."""
        self._require_alive()
        with self._manager.pause():
            ids = torch.tensor([tokens[:-1]], device=self.model.device)
            logits = self.model(ids, past_key_values=cache, use_cache=True).logits[0]
            if logits.isnan().any():
                raise _make_overflow_error(cache.get_seq_length())
            return make_logprobs(logits, tokens[1:], num_top)

    def _prepare_processor(self, processor: Any, sampler: Sampler) -> None:
        """Make the batch processor sample tokens as each request's Sequence specifies."""
        buffers = processor.inputs_and_outputs
        vocab_size = self.vocab_size

        def choose_tokens(_: Any, scores: torch.Tensor, output_ids: torch.Tensor) -> None:
            max_scores, tokens = scores[0].max(-1)
            is_failed = max_scores.isfinite().logical_not_()
            output_ids[0, : len(tokens)] = torch.where(is_failed, tokens + vocab_size, tokens)

        # A row without finite logits gets a token past the vocabulary, so that only its request
        # fails. `_sample` is private, but no public method of the engine gets logits and tokens.
        processor.model_runner._sample = MethodType(choose_tokens, processor.model_runner)
        stock_batch_update = buffers.prepare_batch_update

        def prepare_batch_update() -> tuple[list[Any], list[int], None]:
            requests, tokens, _ = stock_batch_update()
            return (*self._record_tokens(processor, sampler, requests, tokens), None)

        buffers.prepare_batch_update = prepare_batch_update
        if processor.use_async_batching:  # a step reads the previous step's tokens on the device
            stock_carry_over = buffers.carry_over_tokens

            def carry_over_tokens(input_ids: torch.Tensor, *args: torch.Tensor) -> None:
                stock_carry_over(input_ids, *args)
                input_ids.remainder_(vocab_size)

            buffers.carry_over_tokens = carry_over_tokens
        processor.cache.on_prefix_match = _record_prefix

    # -- methods called in the engine's thread ---------------------------------------------------

    def _record_tokens(
        self, processor: Any, sampler: Sampler, requests: list[Any], tokens: Iterable[int]
    ) -> tuple[list[Any], list[int]]:
        """Record the tokens of a step. Return the unfinished requests, and their tokens."""
        unfinished_requests = []
        unfinished_tokens = []
        rows = enumerate(tokens)
        for request in requests:
            row, token = next(rows) if request.has_new_token else (None, None)
            state = request.state
            if state.error is not None:  # the request was ended while this step ran
                continue
            if row is None or token is None:
                unfinished_requests.append(request)
                continue
            sequence: Sequence = state.logit_processor_kwargs[SEQUENCE_KEY]
            try:
                accept_token(sequence, token, self.vocab_size)
                sampler.record(row, token)
                sequence.answer.append(token)
                self._metrics.record_token(sequence, state.lifespan[0])
                if not _must_end(sequence, self.vocab_size):
                    unfinished_requests.append(request)
                    unfinished_tokens.append(token)
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
        return unfinished_requests, unfinished_tokens


def _must_end(sequence: Sequence, vocab_size: int) -> bool:
    """Return whether the engine must end the answer: it is complete, and no token could end it."""
    return (
        sequence.guide is not None
        and sequence.guide.is_complete
        and not any(token < vocab_size for token in sequence.end_tokens)
    )


def accept_token(sequence: Sequence, token: int, vocab_size: int) -> None:
    """Advance a request's grammar by a token. Raise APIError if the request fails at the token."""
    guide = sequence.guide
    rules = sequence.rules
    if token < vocab_size:
        if guide is not None and token not in sequence.end_tokens:
            guide.accept(token)
        return
    if guide is not None and rules.min_tokens:
        raise make_field_error(guide.field, "min_tokens removes every token that may follow")
    position = len(sequence.prompt) + len(sequence.answer)
    if guide is not None or rules:
        raise _make_overflow_error(position, "logit_bias or the answer's format leaves none, or ")
    raise _make_overflow_error(position)


def _make_overflow_error(position: int, other_cause: str = "") -> APIError:
    return APIError(
        500,
        f"no logit of token {position} is finite: {other_cause}the model overflows on this "
        "prompt, or with these weights and dtype",
    )


def _record_prefix(state: Any, num_tokens: int) -> None:
    """Record the number of prompt tokens in the pages, unless the request is resumed."""
    sequence: Sequence = state.logit_processor_kwargs[SEQUENCE_KEY]
    if sequence.last_token_at is None:
        sequence.num_cached_tokens = num_tokens


def explain_fixed_steps(processor: Any) -> str | None:
    """Return the reason why requests cannot change the steps of a processor, or None."""
    if processor.use_async_batching:
        return "asynchronous batching begins a step before the last token is known"
    if getattr(processor.model_runner, "pad_inputs", False):
        return "CUDA graphs and compiled steps cannot change with a request"
    return None


def _compute_cpu_bytes(model: Any) -> int:
    """Return the memory for the pages of a model on a CPU."""
    sizes = FP8PagedCache(model.config).count_bytes(_MIN_CPU_TOKENS) or (0.0, 0.0)
    return max(_CPU_MEMORY_BYTES, int(sizes[0]))  # in bf16, which leaves room for the activations


def _count_free_bytes() -> int:
    """Return the memory that transformers regards as free on a CPU."""
    return int(psutil.virtual_memory().total - psutil.Process().memory_info().rss)
