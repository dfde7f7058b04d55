"""Tests of the sampled queries of a model, and of the cost of errors for their attention.

Costs are compared with the definition in float64.
"""

import pytest
import torch

from hf_fp8kv.calibration.observe import Batch, find_paged_layers
from hf_fp8kv.calibration.queries import Queries, observe_queries
from tests.helpers.tiny_models import VOCAB, build_variant

pytestmark = pytest.mark.text

NUM_HEADS = 2  # KV heads
GROUP_SIZE = 3  # query heads per KV head
NUM_TOKENS = 7
DIM = 4  # head size
POSITIONS = torch.tensor([2, 4, 6])


@pytest.fixture
def states() -> tuple[torch.Tensor, torch.Tensor]:
    """Return random queries, `[Hq, len(POSITIONS), D]`, and keys, `[N, Hkv, D]`."""
    queries = torch.randn(NUM_HEADS * GROUP_SIZE, len(POSITIONS), DIM)
    return queries, torch.randn(NUM_TOKENS, NUM_HEADS, DIM)


def compute_cost(side: str, queries: Queries, error: torch.Tensor) -> torch.Tensor:
    """Return costs of `error`, `[N, Hkv, D]`, by head, `[Hkv]`, float64."""
    weights, error = queries.weights.double(), error.double().transpose(0, 1)[:, None]
    mean = (weights[..., None] * error).sum(-2)
    if side == "v":
        return mean.square().sum((1, 2))
    logit_error = (queries.q.double()[..., None, :] * error).sum(-1)
    mean_error = (weights * logit_error).sum(-1, keepdim=True)
    return (weights * (logit_error - mean_error) ** 2).sum((1, 2))


# -- queries ---------------------------------------------------------------------------------------


def test_queries_that_do_not_fit_the_keys_are_none(states):
    q, k = states
    assert Queries.from_states(q[:5], k, POSITIONS, 1.0, None) is None
    assert Queries.from_states(q[..., :3], k, POSITIONS, 1.0, None) is None


# -- cost of errors --------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["k", "v"])
def test_the_cost_of_errors_matches_its_definition(states, side):
    q, k = states
    queries = Queries.from_states(q, k, POSITIONS, 1.0, None)
    error = torch.randn(NUM_TOKENS, NUM_HEADS, DIM) + 0.5
    expected = compute_cost(side, queries, error).float()
    torch.testing.assert_close(queries.compute_cost(side, error), expected)
    assert len(set(expected.tolist())) == NUM_HEADS  # queries weight errors differently


# -- queries of a model ----------------------------------------------------------------------------


def call_with_queries(model, batch, on_layer):
    observe_queries(model, batch, find_paged_layers(model), on_layer)


def make_random_windows(*lengths: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, VOCAB, (length,), generator=generator) for length in lengths]


# Full attention and windows, an unusual scaling, and fewer or more tokens than queries.
@pytest.mark.parametrize(
    ("name", "config", "num_tokens", "window"),
    [
        ("mistral", {}, 30, 8),
        ("mistral", {}, 100, 8),
        ("llama", {}, 100, 100),
        ("gemma3_text", {"query_pre_attn_scalar": 7}, 100, 100),
    ],
)
@torch.no_grad()
def test_queries_match_the_attention_of_the_model(name, config, num_tokens, window):
    """Queries are from the last three quarters. Their weights are rows of the model's attention."""
    model, (ids,) = build_variant(name, **config)[0], make_random_windows(num_tokens)
    calls: list[Queries] = []
    batch = Batch((ids,))
    call_with_queries(model, batch, lambda i, k, v, queries: calls.append(queries))
    eager = build_variant(name, attn_implementation="eager", **config)[0]
    eager.load_state_dict(model.state_dict())
    attention = eager(input_ids=ids[None], output_attentions=True).attentions
    assert len(calls) == len(attention)
    positions = torch.linspace(num_tokens // 4, num_tokens - 1, min(64, num_tokens)).long()
    assert (positions[0], positions[-1]) == (num_tokens // 4, num_tokens - 1)
    num_attended = []
    for weights, call in zip(attention, calls, strict=True):
        expected = weights[0][:, positions]
        num_attended.append((expected > 0).sum(-1).max())
        torch.testing.assert_close(call.weights.view_as(expected), expected, rtol=1e-3, atol=1e-5)
    assert max(num_attended) == window


def test_a_batch_of_several_texts_has_no_queries():
    calls: list[Queries | None] = []
    batch = Batch(tuple(make_random_windows(12, 9)))
    model = build_variant("mistral")[0]
    call_with_queries(model, batch, lambda i, k, v, queries: calls.append(queries))
    assert calls == [None, None]
