"""Measure what grammars cost a step of the server: `python -m tests.tools.grammar_cost`.

Steps of 8 and 32 requests, of which none, one or all follow a JSON schema, with the tokens of the
tiny model (95) and of the demo model (49,152). One thread; without the model itself.
"""

import argparse
import copy
import statistics
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import torch
from transformers import AutoTokenizer

from hf_fp8kv import demo_model_path
from hf_fp8kv.serving.server import grammars
from hf_fp8kv.serving.server.structured_output import read_grammar
from tests.helpers.serve_process import save_chat_model
from tests.serving.test_structured import PERSON

ANSWER = (
    '{"name": "Bob", "age": 42, "share": 0.5, "tags": ["red", "blue"], '
    '"home": {"known": true, "kind": "flat"}}'
)


def measure(tokenizer: object, guide: grammars.Guide, rows: int, guides: int) -> float:
    """Return the median time of a step, in microseconds: masks, applying them, going on."""
    vocabulary, found = len(tokenizer), []
    mask, scores = grammars.GrammarMask(vocabulary), torch.ones(rows, vocabulary)
    for _ in range(5):
        given = [{"guide": copy.deepcopy(guide)} for _ in range(guides)] + [{}] * (rows - guides)
        states = [
            SimpleNamespace(logit_processor_kwargs=kwargs, _eos_token_ids={vocabulary - 1})
            for kwargs in given
        ]
        requests = [SimpleNamespace(state=state) for state in states]
        for token in tokenizer(ANSWER)["input_ids"][:-1]:
            scores.fill_(0.5)
            begin = time.perf_counter()
            mask(scores, mask.prepare_tensor_args(requests))
            errors = [grammars.follow(state, token, vocabulary) for state in states]
            found.append(time.perf_counter() - begin)
            assert not any(errors), errors
    return statistics.median(found) * 1e6


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    torch.set_num_threads(1)
    for name in (save_chat_model(Path(tempfile.mkdtemp())), demo_model_path()):
        tokenizer = AutoTokenizer.from_pretrained(name)
        made = grammars.Grammars(tokenizer, len(tokenizer), None)
        asked = read_grammar({"structured_outputs": {"json": PERSON}})
        assert asked is not None
        times = []
        for _ in range(20):
            begin = time.perf_counter()
            guide = made._compile(*asked)
            times.append((time.perf_counter() - begin) * 1e3)
        later = statistics.median(times[1:])
        print(f"{len(tokenizer)} tokens: first request {times[0]:.0f} ms, later ones {later:.1f}")
        for rows, guides in ((8, 0), (8, 1), (8, 8), (32, 0), (32, 32)):
            found = measure(tokenizer, guide, rows, guides)
            print(f"  {rows} requests, {guides} with a grammar: {found:.0f} us a step")


if __name__ == "__main__":
    main()
