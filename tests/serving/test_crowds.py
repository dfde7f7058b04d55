"""Tests that concurrent requests get the same answers as single requests.

With pages in float32, the dtype of the model, transformers' `generate()` with the stock cache
gives the same answers.
"""

import random
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import LlamaForCausalLM, LogitsProcessor

from tests.helpers.margins import require_wide_margins
from tests.helpers.serve_process import (
    COMPLETIONS,
    HostedServer,
    RunningServer,
    generate_stock,
    read_answer,
)

pytestmark = pytest.mark.text

pytest.importorskip("starlette", reason="needs the extra serve")
pytest.importorskip("llguidance", reason="needs the extra serve")
from hf_fp8kv.serving.engines.noise import make_gumbel_noise, make_noise_key  # noqa: E402

NUM_REQUESTS = 50
NEW_TOKENS = 16
NUM_PAGES = 48  # for about a third of the requests
TEMPERATURE = 1.3
STRUCTURES = (
    {"regex": "[a-f]{2,5}=[0-9]+;?"},
    {"choice": ["one", "other", "oth"]},
    {"json": {"type": "array", "items": {"type": "integer"}, "maxItems": 3}},
)


class SeededSampling(LogitsProcessor):
    """Gives the highest score to the token that the server samples with a seed."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def __call__(self, input_ids, scores):
        key = torch.tensor([make_noise_key(self._seed, input_ids.shape[1])], dtype=torch.int64)
        return scores / TEMPERATURE + make_gumbel_noise(key.to(torch.int32), scores.shape[1])


def make_prompts() -> list[str]:
    """Return prompts of 2 to 130 characters. Most begin like another prompt."""
    # This is the first seed for which all margins between tokens are wide (`require_wide_margins`).
    generator = random.Random(0)

    def draw_text(max_length: int) -> str:
        return "".join(generator.choices("abcdefghij klmnop", k=generator.randrange(2, max_length)))

    prefixes = ["", *(draw_text(90) for _ in range(5))]
    return [generator.choice(prefixes) + draw_text(40) for _ in range(NUM_REQUESTS)]


PROMPTS = make_prompts()
# For each kind of request, a function from a request's index to its fields.
KIND_FIELDS = {
    "seeds": lambda index: {
        "temperature": TEMPERATURE,
        "seed": index // 2,
        "top_k": -1,
        "top_p": 1,
    },
    "structured": lambda index: {"structured_outputs": STRUCTURES[index % 3]},
}


@pytest.fixture(scope="module")
def server(folder):
    options = ("--kv-cache-dtype", "auto", "--cb-num-blocks", str(NUM_PAGES))
    with HostedServer(folder, *options) as server:
        yield server


def complete(server: RunningServer, index: int, kind: str) -> str:
    fields = {"prompt": PROMPTS[index], "max_tokens": NEW_TOKENS, **KIND_FIELDS[kind](index)}
    return read_answer(server.answer(COMPLETIONS, **fields))


def disconnect(server: RunningServer, index: int) -> None:
    fields = {"prompt": PROMPTS[index][:60], "max_tokens": 200, "stream": index % 2 == 0}
    with server.abandon_request(COMPLETIONS, **fields | KIND_FIELDS["seeds"](index)):
        time.sleep(index % 8 * 0.05)


def generate_answers(folder: str, num_requests: int) -> list[str]:
    model = LlamaForCausalLM.from_pretrained(folder)
    answers = (
        generate_stock(
            model, prompt, NEW_TOKENS, SeededSampling(index // 2), *require_wide_margins(1e-4)
        )
        for index, prompt in enumerate(PROMPTS[:num_requests])
    )
    return [answer.replace("?", "") for answer in answers]  # "?" is the special token


@pytest.mark.parametrize("num_requests", [20, pytest.param(NUM_REQUESTS, marks=pytest.mark.full)])
@pytest.mark.parametrize("kind", KIND_FIELDS)
def test_concurrent_requests_match_single_requests(server, folder, kind, num_requests):
    single_answers = [complete(server, index, kind) for index in range(num_requests)]
    assert len(set(single_answers)) > (0.2 if kind == "structured" else 0.6) * num_requests
    metric = 'requests_total{status="499"}'
    old_count = server.wait_until(requests_active=0).get(metric, 0)
    num_disconnects = 4 * num_requests // 5
    with ThreadPoolExecutor(num_requests + num_disconnects) as pool:
        disconnects = [pool.submit(disconnect, server, index) for index in range(num_disconnects)]
        indices = random.Random(1).sample(range(num_requests), num_requests)
        futures = {index: pool.submit(complete, server, index, kind) for index in indices}
        concurrent_answers = [futures[index].result() for index in range(num_requests)]
        for future in disconnects:
            future.result()
    assert server.wait_until(requests_active=0)[metric] > old_count
    assert concurrent_answers == single_answers
    if kind == "seeds":
        assert concurrent_answers == generate_answers(folder, num_requests)
