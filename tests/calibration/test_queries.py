"""Tests of the sampled queries of a model, and of the cost of errors for their attention."""

import pytest
import torch

from hf_fp8kv.calibration.observe import find_paged_layers
from hf_fp8kv.calibration.queries import Queries, observe_queries
from tests.helpers.tiny_models import VOCAB, build_variant

pytestmark = pytest.mark.text


@pytest.mark.parametrize("side", ["k", "v"])
def test_the_cost_of_errors_matches_its_definition(side):
    # A model with 2 KV heads has 3 queries in each of 6 query heads.
    k = torch.randn(7, 2, 4)
    queries = Queries.from_states(torch.randn(6, 3, 4), k, torch.tensor([2, 4, 6]), 1.0, None)
    error = torch.randn(k.shape) + 0.5
    weights = queries.weights.double()
    head_errors = error.double().transpose(0, 1)[:, None]
    if side == "v":
        expected = (weights[..., None] * head_errors).sum(-2).square().sum((1, 2))
    else:
        logit_errors = (queries.q.double()[..., None, :] * head_errors).sum(-1)
        means = (weights * logit_errors).sum(-1, keepdim=True)
        expected = (weights * (logit_errors - means) ** 2).sum((1, 2))
    torch.testing.assert_close(queries.compute_cost(side, error), expected.float())
    assert len({*expected.tolist()}) == 2  # queries weight errors differently


def record_queries(model, window: torch.Tensor) -> list[Queries | None]:
    layer_states = observe_queries(model, window, find_paged_layers(model))
    return [queries for _, _, queries in layer_states.values()]


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
    # Queries are from the last three quarters of the text. The weights of a query are a row of the
    # model's attention.
    model = build_variant(name, **config)[0]
    ids = torch.randint(3, VOCAB, (num_tokens,), generator=torch.Generator().manual_seed(3))
    layer_queries = record_queries(model, ids)
    eager = build_variant(name, attn_implementation="eager", **config)[0]
    eager.load_state_dict(model.state_dict())
    attention = eager(input_ids=ids[None], output_attentions=True).attentions
    positions = torch.linspace(num_tokens // 4, num_tokens - 1, min(64, num_tokens)).long()
    assert (positions[0], positions[-1]) == (num_tokens // 4, num_tokens - 1)
    num_attended = []
    for layer_weights, queries in zip(attention, layer_queries, strict=True):
        expected = layer_weights[0][:, positions]
        num_attended.append((expected > 0).sum(-1).max())
        actual = queries.weights.view_as(expected)
        torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-5)
    assert max(num_attended) == window
