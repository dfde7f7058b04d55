"""Measure the cost of grammars in a step of the server: `python -m tests.tools.grammar_cost`.

Steps have 8 or 32 requests. None, one or all of them follow a JSON schema. The tokens are the
vocabulary of the tiny model (95) or of the demo model (49,152). The model does not run, and torch
has one thread.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
from transformers import AutoTokenizer

from hf_fp8kv import demo_model_path
from hf_fp8kv.server.engine import check_token
from hf_fp8kv.server.sampling import Sampler, Sequence
from hf_fp8kv.server.schemas import CompletionRequest
from hf_fp8kv.server.structured import Grammars, Guide, read_grammar
from tests.helpers.serve_process import save_chat_model, step_of
from tests.serving.test_structured import PERSON

ANSWER = (
    '{"name": "Bob", "age": 42, "share": 0.5, "tags": ["red", "blue"], '
    '"home": {"known": true, "kind": "flat"}}'
)


def measure(tokenizer: object, guide: Guide, rows: int, guides: int) -> float:
    """Return the median time of a step, in microseconds: make masks, apply them, and advance."""
    vocabulary, times = len(tokenizer), []
    sampler, scores = Sampler([], vocabulary), torch.ones(rows, vocabulary)
    arguments, ends = torch.zeros(5, rows, dtype=torch.int32), frozenset({vocabulary - 1})
    sampler.fill_defaults(arguments)
    for _ in range(5):
        forks = [guide.fork() for _ in range(guides)] + [None] * (rows - guides)
        sequences = [Sequence([0], 999, ends, guide=fork) for fork in forks]
        requests = step_of(sequences, 1)
        for token in tokenizer(ANSWER)["input_ids"][:-1]:
            scores.fill_(0.5)
            begin = time.perf_counter()
            sampler.prepare_tensor_args(requests, arguments)
            sampler(arguments[0], scores, arguments)
            for sequence in sequences:
                check_token(sequence, token, vocabulary)
            times.append(time.perf_counter() - begin)
    return statistics.median(times) * 1e6


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    torch.set_num_threads(1)
    for name in (save_chat_model(Path(tempfile.mkdtemp())), demo_model_path()):
        tokenizer = AutoTokenizer.from_pretrained(name)
        grammars = Grammars(tokenizer, len(tokenizer), None)
        grammar = read_grammar(CompletionRequest(prompt="x", structured_outputs={"json": PERSON}))
        assert grammar is not None
        times = []
        for _ in range(20):
            begin = time.perf_counter()
            guide = grammars._compile(*grammar)
            times.append((time.perf_counter() - begin) * 1e3)
        later = statistics.median(times[1:])
        print(f"{len(tokenizer)} tokens: first request {times[0]:.0f} ms, later {later:.1f} ms")
        for rows, guides in ((8, 0), (8, 1), (8, 8), (32, 0), (32, 32)):
            microseconds = measure(tokenizer, guide, rows, guides)
            print(f"  {rows} requests, {guides} with a grammar: {microseconds:.0f} us per step")


if __name__ == "__main__":
    main()
