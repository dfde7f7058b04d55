"""Random programs of `generate()` calls, which run with and without captured steps.

    python -m tests.helpers.capture_programs FIRST_SEED NUM_PROGRAMS

A program is a list of calls of one model: greedy or sampling, with padding, several answers, beams,
streamers, criteria that stop or change the cache, constrained decoding, returned caches that are
continued, exceptions, and changes of the model between calls.
"""

import copy
import random
import sys
from collections import Counter
from typing import Any

import pytest
import torch
from transformers.generation.streamers import BaseStreamer

from hf_fp8kv import FP8PagedCache, disable, enable
from hf_fp8kv.attention import capture
from hf_fp8kv.modeling.model_support import CACHE
from tests.helpers.recorded_graph import recorded_graphs
from tests.helpers.tiny_models import VOCAB, build_variant

MODELS = ("gqa", "mha", "sliding", "sliding_and_full", "softcap", "sinks", "latent", "hybrid")
COMMON = {"pad_token_id": 0, "eos_token_id": None, "return_dict_in_generate": True}
LONG_CALL = 31  # minimum number of steps of calls whose replays are counted


class _Failure(Exception):
    """Raised by a processor."""


class _Recorder(BaseStreamer):
    def __init__(self) -> None:
        self.tokens: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.tokens.append(value.tolist())

    def end(self) -> None:
        self.tokens.append("end")


class _Call:
    """A random call. Its methods are a logits processor, a criterion and a constraint.

    Attributes:
        change: Name of a change before the call, or None.
        disturbance: Name of a call of the cache by a criterion, or None.
    """

    def __init__(self, rng: random.Random) -> None:
        self.seed = rng.randrange(10**6)
        self.batch = rng.choice((1, 1, 2, 3))
        self.num_prompt_tokens = rng.randint(2, 30)
        self.num_padding = rng.choice((0, 0, 1, 3))
        self.num_new_tokens = rng.choice((1, 4, 15, 16, 17, 20, 32, 40, 64))
        self.do_sample = rng.random() < 0.4
        self.num_beams = rng.choice((1, 1, 1, 1, 1, 2))
        self.num_answers = rng.choice((1, 2, 3)) if self.do_sample and self.num_beams == 1 else 1
        self.stop_step = rng.choice((None, None, rng.randint(1, 40)))
        self.failing_step = rng.choice((None, None, None, None, rng.randint(1, 40)))
        self.is_constrained = rng.random() < 0.2
        self.continues = rng.random() < 0.5
        self.chunk_size = rng.choice((None, None, None, 5))
        self.options = rng.choice(({}, {}, {}, {"disable_compile": True}, {"output_scores": True}))
        self.change = rng.choice((None, None, "weights", "enable", "fork", "reset", "dtype"))
        self.disturbance = rng.choice((None, None, None, "fork", "memory"))
        self.num_steps = 0
        self.cache: Any = None

    def process(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.num_steps += 1
        if self.num_steps == self.failing_step:
            raise _Failure
        return scores

    def stop(self, ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        if self.cache is not None and self.num_steps % 7 == 3:
            if self.disturbance == "fork":
                self.cache.fork()
            elif self.disturbance == "memory":
                self.cache.memory_footprint()
        is_done = self.stop_step is not None and self.num_steps >= self.stop_step
        return torch.full((len(ids),), is_done)

    def constrain(self, _: int, ids: torch.Tensor) -> list[int]:
        return [(int(ids[-1]) * 7 + i) % (VOCAB - 1) + 1 for i in range(5)]


def make_program(seed: int) -> tuple[str, list[_Call]]:
    """Return the name of a model, and the calls of a program."""
    rng = random.Random(seed)
    calls = [_Call(rng) for _ in range(rng.randint(2, 5))]
    return rng.choice(MODELS), calls


def run_program(seed: int, **keywords: Any) -> list[Any]:
    """Return everything that the calls return or leave in their caches.

    `keywords` are keywords of `enable`.
    """
    name, calls = make_program(seed)
    is_hybrid = name == "hybrid"
    model = copy.deepcopy(build_variant(name)[0])
    # Every tenth program has the plan of its model. Choosing a plan runs the model.
    dtype = "adaptive" if seed % 10 == 1 else ("fp8_e3m4", "int8", "model")[seed % 3]
    keywords = {"page_size": 8, "dtype": dtype, **keywords}
    enable(model, **keywords)
    results: list[Any] = []
    previous: Any = None  # tokens and cache of the previous call
    for call in calls:
        rng = random.Random(call.seed)
        torch.manual_seed(call.seed)
        if call.change == "weights":
            for parameter in list(model.parameters())[:3]:
                parameter.data = parameter.data * 1.01
        elif call.change == "dtype":
            model = model.to(torch.bfloat16 if model.dtype == torch.float32 else torch.float32)
        elif call.change == "enable":
            disable(model)
            enable(model, **keywords)
        if call.change in ("weights", "dtype"):
            previous = None
        ids = torch.tensor(
            [
                [rng.randrange(1, VOCAB) for _ in range(call.num_prompt_tokens)]
                for _ in range(call.batch)
            ]
        )
        mask = torch.ones_like(ids)
        arguments: dict[str, Any] = {"num_return_sequences": call.num_answers}
        if previous is not None and call.continues and call.num_beams == 1:
            tokens, call.cache = previous
            if call.change == "fork":
                call.cache = call.cache.fork()
            elif call.change == "reset" and not is_hybrid:
                call.cache.reset()
            ids = torch.cat([tokens, torch.full((len(tokens), 2), 5)], 1)
            mask = torch.ones_like(ids)
            arguments = {"past_key_values": call.cache}
        else:
            num_padding = min(call.num_padding, call.num_prompt_tokens - 1)
            mask[0, :num_padding] = ids[0, :num_padding] = 0
        if call.num_beams > 1:
            arguments = {"num_beams": call.num_beams}
        if call.is_constrained:
            arguments["prefix_allowed_tokens_fn"] = call.constrain
        if call.chunk_size and not is_hybrid:
            arguments["prefill_chunk_size"] = call.chunk_size
        is_single = len(ids) == 1 and call.num_beams == 1 and call.num_answers == 1
        streamer = _Recorder() if is_single else None
        try:
            output = model.generate(
                ids, attention_mask=mask, max_new_tokens=call.num_new_tokens,
                do_sample=call.do_sample, logits_processor=[call.process],
                stopping_criteria=[call.stop], streamer=streamer, **COMMON, **call.options,
                **arguments,
            )  # fmt: skip
        except _Failure:
            results += ["failure", None if call.cache is None else describe(call.cache)]
            previous = None
        else:
            previous = (output.sequences, output[CACHE])
            results += [output.sequences.tolist(), None if streamer is None else streamer.tokens]
            scores = [step_scores.tolist() for step_scores in output.get("scores") or ()]
            results += [describe(output[CACHE]), scores]
    return results


def describe(cache: FP8PagedCache) -> Any:
    """Return the length, the bytes in use and the contents of a cache."""
    # Pages that have left a window are freed by the next step, or by this call.
    cache._paged.crop(0)
    handles = [handle for layer in cache.paged_layers for handle in (layer.keys, layer.values)]
    contents = [None if handle is None else handle.dense().tolist() for handle in handles]
    return cache.host_length(), cache.memory_footprint().used_bytes, contents


def check_program(seed: int, counts: Counter[str]) -> str:
    """Run a program without and with captured steps, and add the steps and replays to `counts`.

    Return a message about the first different result, or "" if all results are equal.
    """
    expected = run_program(seed)
    with pytest.MonkeyPatch.context() as patch, recorded_graphs() as steps:
        growth = random.Random(seed).choice((9, 20, 33, 1024))
        patch.setattr(capture, "MIN_RESERVED_TOKENS", growth)
        actual = run_program(seed, capture=True)
    for step in steps:
        if step.num_steps >= LONG_CALL:
            counts["steps"] += step.num_steps
            counts["replays"] += step.num_replays
    for index, (eager, captured) in enumerate(zip(expected, actual, strict=True)):
        if eager != captured:
            return f"seed {seed}, result {index}: expected {eager!s:.200}, got {captured!s:.200}"
    return ""


def main() -> None:
    first_seed, num_programs = map(int, sys.argv[1:])
    counts = Counter[str]()
    seeds = range(first_seed, first_seed + num_programs)
    differences = list(filter(None, (check_program(seed, counts) for seed in seeds)))
    summary = f"{num_programs} programs, {len(differences)} differ: {dict(counts)}"
    sys.stdout.write("\n".join([*differences, summary]) + "\n")


if __name__ == "__main__":
    main()
