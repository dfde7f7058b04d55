"""Many requests at once get the answers of each alone, next to clients that leave.

With pages of the model's dtype, float32, these are the answers of transformers' `generate()` with
its own cache.
"""

import random
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import LlamaForCausalLM, LogitsProcessor, RepetitionPenaltyLogitsProcessor

from tests.helpers.margins import wide_margins
from tests.helpers.serve_process import Endpoint, generate, hosting, save_chat_model, text_in
from tests.helpers.serving_tools import OpenAIPenalties

pytestmark = pytest.mark.text

pytest.importorskip("fastapi", reason="needs the extra serve")
pytest.importorskip("llguidance", reason="needs the extra serve")
from hf_fp8kv.serving.engines.sampling import gumbel_noise, noise_key  # noqa: E402

COMPLETIONS = "/v1/completions"
REQUESTS, NEW = 50, 16
PAGES = 48  # for about a third of the requests at a time
TEMPERATURE = 1.3
PENALTIES = {"repetition_penalty": 1.2, "presence_penalty": 0.6, "frequency_penalty": -0.4}
FORMS = (
    {"regex": "[a-f]{2,5}=[0-9]+;?"},
    {"choice": ["one", "other", "oth"]},
    {"json": {"type": "array", "items": {"type": "integer"}, "maxItems": 3}},
)


class Sampled(LogitsProcessor):
    """Make the token that a seed chooses the most likely token."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def __call__(self, input_ids, scores):
        key = torch.tensor([noise_key(self._seed, input_ids.shape[1])], dtype=torch.int64)
        return scores / TEMPERATURE + gumbel_noise(key.to(torch.int32), scores.shape[1])


def some_prompts() -> list[str]:
    """Return texts of 2 to 130 characters. Most texts share their beginning with another text."""
    # The first seed from 0 for which all margins between tokens are wide, see `wide_margins`.
    chance = random.Random(0)

    def some(most: int) -> str:
        return "".join(chance.choices("abcdefghij klmnop", k=chance.randrange(2, most)))

    shared = ["", *(some(90) for _ in range(5))]
    return [chance.choice(shared) + some(40) for _ in range(REQUESTS)]


PROMPTS = some_prompts()
# The fields of each request, by its number.
ASKED = {
    "greedy": lambda _: {},
    "penalties": lambda _: PENALTIES,
    "seeds": lambda n: {"temperature": TEMPERATURE, "seed": n // 2, "top_k": -1, "top_p": 1},
    "structured": lambda n: {"structured_outputs": FORMS[n % 3]},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_chat_model(tmp_path_factory.mktemp("crowd"))


@pytest.fixture(scope="module")
def server(folder):
    options = ("--kv-cache-dtype", "auto", "--cb-num-blocks", str(PAGES))
    with hosting(folder, *options) as server:
        yield server


def complete(server: Endpoint, number: int, kind: str) -> str:
    sent = {"prompt": PROMPTS[number], "max_tokens": NEW, **ASKED[kind](number)}
    return text_in(server.answer(COMPLETIONS, **sent))


def leave(server: Endpoint, number: int) -> None:
    """Request a long answer to the beginning of a prompt, and do not wait for the answer."""
    sent = {"prompt": PROMPTS[number][:60], "max_tokens": 200, "stream": number % 2 == 0}
    with server.leaving(COMPLETIONS, **sent | ASKED["seeds"](number)):
        time.sleep(number % 8 * 0.05)


def generated(folder: str, kind: str, count: int) -> list[str]:
    """Return the answers of `generate()` with transformers' own cache."""
    model = LlamaForCausalLM.from_pretrained(folder)
    texts = []
    for number, prompt in enumerate(PROMPTS[:count]):
        changes = {
            "greedy": [],
            "penalties": [
                RepetitionPenaltyLogitsProcessor(PENALTIES["repetition_penalty"]),
                OpenAIPenalties(
                    len(prompt), PENALTIES["presence_penalty"], PENALTIES["frequency_penalty"]
                ),
            ],
            "seeds": [Sampled(number // 2)],
        }[kind]  # fmt: skip
        text = generate(model, prompt, NEW, *changes, *wide_margins(1e-4))
        texts.append(text.replace("?", ""))  # the tokenizer's special token
    return texts


@pytest.mark.parametrize(
    ("kind", "count"),
    [("seeds", 20), *(pytest.param(kind, REQUESTS, marks=pytest.mark.full) for kind in ASKED)],
)
def test_a_crowd_gets_the_answers_of_each_alone(server, folder, kind, count):
    alone = [complete(server, number, kind) for number in range(count)]
    assert len(set(alone)) > (10 if kind == "structured" else 0.6 * count)
    gone = 'requests_total{status="499"}'
    before = server.wait_until(requests_active=0).get(gone, 0)
    left = 4 * count // 5
    with ThreadPoolExecutor(count + left) as pool:
        leaving = [pool.submit(leave, server, number) for number in range(left)]
        order = random.Random(1).sample(range(count), count)
        asked = {number: pool.submit(complete, server, number, kind) for number in order}
        together = [asked[number].result() for number in range(count)]
        for one in leaving:
            one.result()
    assert server.wait_until(requests_active=0)[gone] > before
    assert together == alone
    if kind != "structured":
        assert together == generated(folder, kind, count)
