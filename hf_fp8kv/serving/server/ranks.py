"""Tensor parallelism: processes that torchrun started serve one model, and the first has HTTP.

transformers' engine hands requests and their ends on from the first process to the others, and
all run the same steps. What a step chooses is the first one's alone to say: it sends the tokens,
and what became of the grammars of its requests, so that no rounding, and nothing that only one
process has, can make the steps differ.
"""

import copy
import os
import re
import traceback
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LogitsProcessorList

from ...errors import ConfigError, EngineError
from ...modeling.tensor_parallel import check_plan
from .grammars import GUIDE

_NEEDED = ("tp_broadcast_from_rank_0", "tp_broadcast_object_from_rank_0", "is_tp_driver", "tp_size")
# What the engine waits for between looks at its queues, by transformers' version.
_EVENTS = ("_wake_up_loop", "_has_new_requests")


@dataclass(frozen=True)
class Ranks:
    """Which of how many processes this is."""

    rank: int = 0
    size: int = 1

    @classmethod
    def from_environment(cls) -> "Ranks":
        """Return what torchrun says. Raises ConfigError for what it would not say."""
        rank, size = (os.environ.get(name) for name in ("RANK", "WORLD_SIZE"))
        if size in (None, "", "1"):
            return cls()
        if not (rank and size and rank.isdigit() and size.isdigit() and int(rank) < int(size)):
            raise ConfigError(
                f"expected RANK and WORLD_SIZE as torchrun sets them, got {rank!r} and {size!r}; "
                "unset both to serve a model in one process"
            )
        return cls(int(rank), int(size))


# -- loading ---------------------------------------------------------------------------------------


def load_split(
    name: str, revision: str, size: int, *, device: Any, quantization: str | None, **keywords: Any
) -> Any:
    """Return this process's part of a model.

    `device` and `quantization` are transformers' options; `keywords` are those of `from_pretrained`
    besides.

    Raises:
        ConfigError: the model cannot be split so; its weights have not been read then.
    """
    here = torch.accelerator.current_accelerator(check_available=True)
    kind = "cpu" if here is None else here.type
    if device not in ("auto", None, kind):
        raise ConfigError(f"--device: expected auto or {kind} with {size} processes, got {device}")
    if quantization is not None:
        raise ConfigError(f"--quantization: not supported with {size} processes; leave it out")
    trusted = {"trust_remote_code": keywords.get("trust_remote_code", False)}
    config = AutoConfig.from_pretrained(name, revision=revision, **trusted)
    with torch.device("meta"):
        check_plan(AutoModelForCausalLM.from_config(config, **trusted), size)
    from transformers.distributed.configuration_utils import DistributedConfig

    return AutoModelForCausalLM.from_pretrained(
        name, revision=revision, distributed_config=DistributedConfig(tp_plan="auto"), **keywords
    )


# -- the engine ------------------------------------------------------------------------------------


def check_batching(config: Any) -> Any:
    """Return a ContinuousBatchingConfig for several processes.

    Raises:
        ConfigError: it asks for steps that are captured, or planned before the last is over.
    """
    config = copy.copy(config)
    graphs = config.use_cuda_graph
    asked = {
        "use-async-batching": config.use_async_batching,
        "use-cuda-graph": any(graphs) if isinstance(graphs, list | tuple) else graphs,
        "default-compile-level": getattr(config, "default_compile_level", None),
    }
    for name, value in asked.items():
        if value:
            raise ConfigError(
                f"--cb-{name}: not supported with several processes, whose steps wait for the "
                "first one's tokens; leave it out"
            )
    config.use_async_batching = config.use_cuda_graph = False
    return config


def join_ranks(manager: Any, processor: Any) -> None:
    """Make the steps of a batch processor take what the first process chooses.

    Do nothing where the model is whole. Raises ConfigError: this transformers' engine cannot.
    """
    helper: Any = getattr(processor, "distributed_helper", None)
    if getattr(helper, "tp_size", 1) == 1:
        return
    missing = [name for name in _NEEDED if not hasattr(helper, name)]
    if missing or processor.use_async_batching or processor.model_runner.pad_inputs:
        why = f"one without {', '.join(missing)}" if missing else "captured or asynchronous steps"
        raise ConfigError(f"expected an engine for several processes, got {why}; use one process")
    first: bool = helper.is_tp_driver
    _share_tokens(processor.model_runner, helper, first)
    _share_verdicts(processor.inputs_and_outputs, helper, first)
    _order_cancellations(processor.scheduler)
    if not first:
        _follow(manager)
    fail = manager._handle_critical_error

    def handle_critical_error(error: Exception, batch_processor: Any) -> None:
        if _is_of_communication(error):
            text = re.sub(r"^\[\S+\] ", "", str(error)).split(". ")[0]
            error = EngineError(
                f"one of the {helper.tp_size} processes that serve the model has ended, or cannot "
                f"be reached ({text:.200})"
            )
        # The engine would tell the others, which may have ended, or wait for this one in the middle
        # of a step. This process ends, which they notice.
        helper.tp_all_reduce_state = lambda *_: None
        fail(error, batch_processor)

    manager._handle_critical_error = handle_critical_error


def _is_of_communication(error: Exception) -> bool:
    """Return whether an error was raised inside torch.distributed, in whichever call."""
    frames = traceback.walk_tb(error.__traceback__)
    modules = (str(frame.f_globals.get("__name__")) for frame, _ in frames)
    return any(module.startswith("torch.distributed.") for module in modules)


def _share_tokens(runner: Any, helper: Any, first: bool) -> None:
    """Have all processes take the tokens that the first one samples."""
    sample_here = runner._sample

    def sample(_: Any, scores: torch.Tensor, output_ids: torch.Tensor) -> None:
        if first:
            sample_here(scores, output_ids)
        helper.tp_broadcast_from_rank_0(output_ids[0, : scores.shape[1]])

    runner._sample = MethodType(sample, runner)


def _share_verdicts(tensors: Any, helper: Any, first: bool) -> None:
    """Have all processes do to requests with a grammar what the first one does."""
    finish = tensors.prepare_batch_update

    def prepare_batch_update() -> Any:
        states = [r.state for r in tensors.requests_in_batch if r.has_new_token]
        states = [state for state in states if GUIDE in state.logit_processor_kwargs]
        if not states:
            return finish()
        guides = [state.logit_processor_kwargs[GUIDE] for state in states]
        if first:
            found = finish()
            pairs = zip(states, guides, strict=True)
            helper.tp_broadcast_object_from_rank_0([(s.error, g.complete) for s, g in pairs])
            return found
        verdicts = helper.tp_broadcast_object_from_rank_0(None)
        for guide, verdict in zip(guides, verdicts, strict=True):
            guide.verdict = verdict
        return finish()

    tensors.prepare_batch_update = prepare_batch_update


def _order_cancellations(scheduler: Any) -> None:
    """Have all processes end cancelled requests in one order: a set has another in each of them.

    It decides which pages are free first, and so what later requests find in the pages.
    """
    clear = scheduler.clear_cancelled_requests

    def clear_cancelled_requests() -> Any:
        with scheduler._cancellation_lock:
            scheduler._requests_to_cancel = sorted(scheduler._requests_to_cancel)
        return clear()  # and begins another set

    scheduler.clear_cancelled_requests = clear_cancelled_requests


class _NoWait:
    """An event that nobody waits for: what the process does next comes from the first one."""

    def wait(self, timeout: float | None = None) -> None:
        pass

    set = clear = lambda self: None


def _follow(manager: Any) -> None:
    """Leave choices and outputs to the first process."""
    manager.logit_processor.logits_processor = LogitsProcessorList()
    manager.logit_processor.do_processing = False
    router = manager.output_router
    router.deliver = router.deliver_batch = lambda _: None  # nobody would take them
    for name in _EVENTS:
        if hasattr(manager, name):
            setattr(manager, name, _NoWait())
