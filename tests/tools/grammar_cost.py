"""Measure how long grammars take in a server step: `python -m tests.tools.grammar_cost`.

A step has 8 requests, of which none, one or all have a JSON schema, or 32 requests, of which none
or all have the schema. The vocabulary is from the tiny model (95 tokens) or the demo model (49,152
tokens). No model runs, and torch uses one thread.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from hf_fp8kv import demo_model_path
from hf_fp8kv.server.engine import check_token
from hf_fp8kv.server.sampling import Sampler, Sequence
from hf_fp8kv.server.schemas import CompletionBody
from hf_fp8kv.server.structured import Grammars, Guide, read_grammar
from tests.helpers.serve_process import make_step, save_chat_model
from tests.serving.test_structured import PERSON

ANSWER = (
    '{"name": "Bob", "age": 42, "share": 0.5, "tags": ["red", "blue"], '
    '"home": {"known": true, "kind": "flat"}}'
)


def measure_step(tokenizer: Any, guide: Guide, num_requests: int, num_schemas: int) -> float:
    """Return the median microseconds of a step, which masks the logits and advances the guides."""
    vocabulary_size = len(tokenizer)
    step_seconds = []
    sampler = Sampler([], vocabulary_size)
    logits = torch.empty(num_requests, vocabulary_size)
    sampling_args = torch.zeros(5, num_requests, dtype=torch.int32)
    end_tokens = frozenset({vocabulary_size - 1})
    sampler.fill_defaults(sampling_args)
    for _ in range(5):
        guides = [guide.fork() for _ in range(num_schemas)] + [None] * (num_requests - num_schemas)
        sequences = [Sequence([0], 999, end_tokens, guide=fork) for fork in guides]
        requests = make_step(sequences, 1)
        for token in tokenizer(ANSWER)["input_ids"][:-1]:
            logits.fill_(0.5)
            start = time.perf_counter()
            sampler.prepare_tensor_args(requests, sampling_args)
            sampler(sampling_args[0], logits, sampling_args)
            for sequence in sequences:
                check_token(sequence, token, vocabulary_size)
            step_seconds.append(time.perf_counter() - start)
    return statistics.median(step_seconds) * 1e6


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    torch.set_num_threads(1)
    for folder in (save_chat_model(Path(tempfile.mkdtemp())), demo_model_path()):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        grammars = Grammars(tokenizer, len(tokenizer), None)
        grammar = read_grammar(CompletionBody(prompt="x", structured_outputs={"json": PERSON}))
        assert grammar is not None
        compile_ms = []
        for _ in range(20):
            start = time.perf_counter()
            guide = grammars._compile_grammar(*grammar)
            compile_ms.append((time.perf_counter() - start) * 1e3)
        median_ms = statistics.median(compile_ms[1:])
        print(f"{len(tokenizer)} tokens: to compile the schema, {compile_ms[0]:.0f} ms at first, "
              f"then {median_ms:.1f} ms (median)")  # fmt: skip
        for num_requests, num_schemas in ((8, 0), (8, 1), (8, 8), (32, 0), (32, 32)):
            step_us = measure_step(tokenizer, guide, num_requests, num_schemas)
            counts = f"{num_requests} requests, {num_schemas} with the schema"
            print(f"  {counts}: {step_us:.0f} us per step")


if __name__ == "__main__":
    main()
