"""Random programs of `generate()` calls, which run with and without captured steps.

    python -m tests.helpers.capture_programs [FIRST_SEED NUM_PROGRAMS]

A program is a list of calls of one model: greedy or sampling, with padding, several answers,
streamers, criteria, constrained decoding, returned caches that are continued, exceptions, and
changes of the model between calls.
"""

import copy
import random
import sys
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer

from hf_fp8kv import FP8PagedCache, disable, enable
from hf_fp8kv.attention import capture
from tests.helpers.recorded_graph import recorded_graphs
from tests.helpers.tiny_models import VOCAB, build_variant

MODELS = ("gqa", "mha", "sliding", "sliding_and_full", "softcap", "sinks", "latent", "hybrid")
COMMON = {"pad_token_id": 0, "eos_token_id": None, "return_dict_in_generate": True}


class _Record(BaseStreamer):
    """A streamer that records tokens."""

    def __init__(self) -> None:
        self.tokens: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.tokens.append(value.tolist())

    def end(self) -> None:
        self.tokens.append("end")


class _Failure(Exception):
    """Raised by a processor in a random step."""


def make_program(seed: int) -> tuple[str, list[dict[str, Any]]]:
    """Return the name of a model, and the calls of a program."""
    rng = random.Random(seed)
    calls = []
    for _ in range(rng.randint(2, 5)):
        calls.append({
            "seed": rng.randrange(10**6),
            "batch": rng.choice((1, 1, 2, 3)),
            "prompt": rng.randint(2, 30),
            "padding": rng.choice((0, 0, 1, 3)),
            "new": rng.choice((1, 4, 15, 16, 17, 20, 32, 40, 64)),
            "sample": rng.random() < 0.4,
            "answers": rng.choice((1, 1, 1, 2, 3)),
            "beams": rng.choice((1, 1, 1, 1, 1, 2)),
            "stop": rng.choice((None, None, rng.randint(1, 40))),
            "fail": rng.choice((None, None, None, None, rng.randint(1, 40))),
            "constrained": rng.random() < 0.2,
            "continues": rng.random() < 0.5,
            "chunk": rng.choice((None, None, None, 5)),
            "keywords": rng.choice(({}, {}, {}, {"disable_compile": True}, {"output_scores": True})),
            "between": rng.choice((None, None, "weights", "enable", "fork", "crop", "dtype")),
            "criterion": rng.choice((None, None, None, "fork", "memory", "crop")),
        })  # fmt: skip
    return rng.choice(MODELS), calls


def run_program(
    name: str, calls: list[dict[str, Any]], *, captured: bool, counts: dict[str, int]
) -> list[Any]:
    """Return everything that the calls return or leave in their caches."""
    model, _ = build_variant(name)
    model = copy.deepcopy(model)
    keywords: dict[str, Any] = {"page_size": 8}
    if captured:
        keywords["capture"] = True
    enable(model, **keywords)
    results: list[Any] = []
    cache: Any = None
    tokens: Any = None
    for call in calls:
        rng = random.Random(call["seed"])
        torch.manual_seed(call["seed"])
        if call["between"] == "weights":
            with torch.no_grad():
                for parameter in list(model.parameters())[:3]:
                    parameter.data = parameter.data * 1.01
            cache = None
        elif call["between"] == "enable":
            disable(model)
            enable(model, **keywords)
        elif call["between"] == "dtype":
            model = model.to(torch.float64 if model.dtype == torch.float32 else torch.float32)
            cache = None
        batch = call["batch"]
        ids = torch.tensor(
            [[rng.randrange(1, VOCAB) for _ in range(call["prompt"])] for _ in range(batch)]
        )
        mask = torch.ones_like(ids)
        arguments: dict[str, Any] = {}
        if cache is not None and call["continues"] and tokens.shape[0] and call["beams"] == 1:
            if call["between"] == "fork":
                cache = cache.fork()
            elif call["between"] == "crop" and name != "hybrid":
                cache.reset()
            ids = torch.cat([tokens, torch.full((len(tokens), 2), 5)], 1)
            mask = torch.ones_like(ids)
            arguments["past_key_values"] = cache
            answers = 1
        else:
            answers = call["answers"]
            padding = min(call["padding"], call["prompt"] - 1)
            mask[0, :padding] = 0
            ids[0, :padding] = 0
            if call["beams"] > 1:
                answers = 1
        streamer = _Record() if len(ids) == 1 and call["beams"] == 1 and answers == 1 else None
        num_steps = 0

        def process(ids: torch.Tensor, scores: torch.Tensor, call: Any = call) -> torch.Tensor:
            nonlocal num_steps
            num_steps += 1
            if num_steps == call["fail"]:
                raise _Failure
            return scores

        def stop(ids: torch.Tensor, scores: Any, call: Any = call, **_: Any) -> torch.Tensor:
            current = arguments.get("past_key_values")
            if current is not None and num_steps % 7 == 3:
                if call["criterion"] == "fork":
                    current.fork()
                elif call["criterion"] == "memory":
                    current.memory_footprint()
                    repr(current)
            is_done = call["stop"] is not None and num_steps >= call["stop"]
            return torch.full((len(ids),), is_done)

        if call["constrained"]:
            arguments["prefix_allowed_tokens_fn"] = lambda _, ids: [
                (int(ids[-1]) * 7 + k) % (VOCAB - 1) + 1 for k in range(5)
            ]
        if call["beams"] > 1:
            arguments["num_beams"] = call["beams"]
        if call["chunk"] and name != "hybrid":
            arguments["prefill_chunk_size"] = call["chunk"]
        try:
            output = model.generate(
                ids, attention_mask=mask, max_new_tokens=call["new"], do_sample=call["sample"],
                num_return_sequences=answers, logits_processor=[process], stopping_criteria=[stop],
                streamer=streamer, **COMMON, **call["keywords"], **arguments,
            )  # fmt: skip
        except _Failure:
            results.append("failure")
            cache = arguments.get("past_key_values")
            if cache is not None:
                results.append(describe(cache))
                cache = None
        except Exception as error:
            results.append(f"{type(error).__name__}: {error}")
            cache = None
        else:
            tokens = output.sequences
            cache = output.get("cache", output.get("past_key_values"))
            results += [tokens.tolist(), streamer and streamer.tokens, describe(cache)]
            if call["keywords"].get("output_scores"):
                results += [x.tolist() for x in output.scores]
    return results


def describe(cache: FP8PagedCache) -> Any:
    """Return the length, the bytes in use and the contents of a cache."""
    # Pages that have left a window are freed by the next step, or by this call.
    cache._paged.crop(0)
    contents = [
        (x.keys.dense().tolist(), x.values.dense().tolist())
        for x in cache.paged_layers
        if x.keys is not None
    ]
    return cache.host_length(), cache.memory_footprint().used_bytes, contents


def check_program(seed: int, counts: dict[str, int]) -> str:
    """Run a program twice. Return the name of its model if the results differ, otherwise ""."""
    name, calls = make_program(seed)
    expected = run_program(name, calls, captured=False, counts={})
    old_minimum = capture.MIN_RESERVED_TOKENS
    capture.MIN_RESERVED_TOKENS = random.Random(seed).choice((9, 20, 33, 1024))
    with recorded_graphs() as made:
        actual = run_program(name, calls, captured=True, counts=counts)
    capture.MIN_RESERVED_TOKENS = old_minimum
    for step in made:
        if step.num_steps >= 31:
            counts["long steps"] = counts.get("long steps", 0) + step.num_steps
            counts["long replays"] = counts.get("long replays", 0) + step.num_replays
        counts["steps"] += step.num_steps
        counts["replays"] += step.num_replays
        if step.reason:
            counts[step.reason] = counts.get(step.reason, 0) + 1
    for i, (x, y) in enumerate(zip(expected, actual, strict=False)):
        if x != y:
            return f"{name}, seed {seed}, result {i}: {str(x)[:200]} ... {str(y)[:200]}"
    return "" if len(expected) == len(actual) else f"{name}, seed {seed}: number of results"


if __name__ == "__main__":
    first, number = (int(x) for x in sys.argv[1:3])
    counts = {"steps": 0, "replays": 0}
    wrong = 0
    for seed in range(first, first + number):
        if problem := check_program(seed, counts):
            wrong += 1
            print(problem, flush=True)
    print(number, "programs", wrong, "wrong", counts)
