"""Tests of sampling in the server: distributions, seeds, and logits that are NaN."""

from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import pytest
import torch

from tests.helpers.serve_process import (
    COMPLETIONS,
    NAN_CHARACTER,
    HostedServer,
    RunningServer,
    add_nan_token,
    make_step_requests,
    read_answer,
    save_chat_model,
)

pytestmark = pytest.mark.text

pytest.importorskip("starlette", reason="needs the extra serve")
from hf_fp8kv.server import metrics, sampling  # noqa: E402


def make_noise_keys(count: int, *, seed: int | None = None) -> torch.Tensor:
    """Return the keys of one seed at `count` positions, or of `count` seeds at one position."""
    pairs = [(n, 5) if seed is None else (seed, n) for n in range(count)]
    return torch.tensor([sampling.make_noise_key(*pair) for pair in pairs]).to(torch.int32)


def matches_distribution(counts: torch.Tensor, expected: torch.Tensor) -> bool:
    """Return whether chi-square is less than five standard deviations above its mean."""
    degrees_of_freedom = counts.numel() - 1
    statistic = ((counts - expected).square() / expected).sum().item()
    return statistic < degrees_of_freedom + 5 * (2 * degrees_of_freedom) ** 0.5


@pytest.mark.parametrize("seed", [None, -3])
def test_tokens_have_the_probabilities_of_the_logits(seed):
    probabilities = torch.randn(30, generator=torch.Generator().manual_seed(1)).softmax(0)
    noise = sampling.make_gumbel_noise(make_noise_keys(50_000, seed=seed), 30)
    counts = (probabilities.log() + noise).argmax(-1).bincount(minlength=30)
    assert matches_distribution(counts, probabilities * len(noise))


@pytest.mark.parametrize("seed", [None, 11])
def test_noise_of_neighbors_is_independent(seed):
    # Adjacent positions of one seed, and adjacent seeds at one position, are independent.
    tokens = sampling.make_gumbel_noise(make_noise_keys(50_000, seed=seed), 16).argmax(-1)
    pair_counts = (16 * tokens[:-1] + tokens[1:]).bincount(minlength=256)
    assert matches_distribution(pair_counts, torch.full((256,), (len(tokens) - 1) / 256))


def test_noise_depends_only_on_key_and_token():
    keys = make_noise_keys(7, seed=3)
    noise = sampling.make_gumbel_noise(keys, 100)
    for row in range(7):
        assert torch.equal(sampling.make_gumbel_noise(keys[row : row + 1], 60)[0], noise[row, :60])


def test_the_largest_noise_is_finite():
    # For this position and token, all bits of the uniform number are 1.
    position = 296
    token = 44251
    noise = sampling.make_gumbel_noise(make_noise_keys(position + 1, seed=7)[-1:], 49152)[0]
    assert noise.isfinite().all()
    assert noise.argmax() == token
    assert noise.min() > -3
    assert 15 < noise[token] < 17


def run_sampler(scores: torch.Tensor, *sequences: sampling.Sequence) -> torch.Tensor:
    """Return the sampler's scores for one step, at position 5. Row i belongs to sequence i."""
    sampler = sampling.Sampler([], scores.shape[1])
    arguments = torch.zeros(5, len(scores), dtype=torch.int32)
    sampler.fill_defaults(arguments[:, -1:])
    sampler.prepare_tensor_args(make_step_requests(sequences, 5), arguments)
    return sampler(torch.zeros(len(scores)), scores.clone(), arguments)


def test_rows_without_temperature_have_no_noise():
    scores = torch.randn(3, 40)
    output = run_sampler(
        scores, sampling.Sequence([1], 9, seed=9),
        sampling.Sequence([1], 9, temperature=0.7, seed=9), sampling.Sequence([1], 9),
    )  # fmt: skip
    assert torch.equal(output[[0, 2]], scores[[0, 2]])
    noise = sampling.make_gumbel_noise(make_noise_keys(6, seed=9)[5:], 40)
    assert torch.equal(output[1], scores[1] / torch.tensor(0.7) + noise[0])


def test_each_row_is_filtered_by_its_limits():
    # At temperature 0, no noise is added, and the row is still filtered.
    logprobs = torch.tensor([0.5, 0.26, 0.14, 0.1]).log()
    scores = logprobs.repeat(7, 1) + torch.arange(7.0)[:, None]
    limits = ({"min_p": 0.3}, {}, {"min_p": 0.25}, {"min_p": 1.0}, {"top_k": 2}, {"top_p": 0.7})
    sequences = (sampling.Sequence([1], 9, **limit) for limit in limits)
    is_kept = run_sampler(scores, *sequences).isfinite()
    assert is_kept.sum(-1).tolist() == [2, 4, 3, 1, 2, 2, 4]
    assert all(row.tolist() == sorted(row.tolist(), reverse=True) for row in is_kept)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = save_chat_model(tmp_path_factory.mktemp("overflows"))
    add_nan_token(folder)
    with HostedServer(folder, "--default-seed", "7") as server:
        yield server


def complete(server: RunningServer, prompt: str, **fields: object) -> str:
    return read_answer(server.answer(COMPLETIONS, **{"prompt": prompt, "max_tokens": 12} | fields))


def test_requests_without_a_seed_do_not_reuse_other_seeds(server):
    texts = set()
    for _ in range(4):
        complete(server, "seeded", temperature=1.5, seed=1)
        texts.add(complete(server, "once upon", temperature=1.5))
    assert len(texts) == 4


def test_latency_metrics_match_their_names(monkeypatch):
    server_metrics = metrics.Metrics("m")
    monkeypatch.setattr(
        metrics.time, "perf_counter", Mock(side_effect=[100.0, 101.0, 104.0, 110.0])
    )
    request = sampling.Sequence([1], 9, submitted_at=90.0)
    for _ in range(3):
        server_metrics.record_token(request, 93.0)
    server_metrics.record_end(request)
    expected_seconds = {
        "queue_time_seconds": 3.0, "time_to_first_token_seconds": 10.0,
        "inter_token_latency_seconds": 4.0, "request_duration_seconds": 20.0,
    }  # fmt: skip
    for name, seconds in expected_seconds.items():
        sample = f"hf_fp8kv_{name}_sum"
        assert server_metrics._registry.get_sample_value(sample, {"model_name": "m"}) == seconds


# Fields of requests whose logits are NaN.
NAN_REQUESTS = (
    {"prompt": NAN_CHARACTER},
    {"prompt": "a" * 40 + NAN_CHARACTER, "temperature": 1.0},
    {"prompt": "a" * 99 + NAN_CHARACTER},
    {"prompt": "a" * 3 + NAN_CHARACTER, "top_p": 0.5},
    {"prompt": f"{NAN_CHARACTER}b", "max_tokens": 0, "echo": True, "logprobs": 0},
)


@pytest.mark.parametrize("stream", [False, True])
def test_nonfinite_logits_only_fail_their_request(server, stream):
    expected = complete(server, "steady", max_tokens=60)
    with ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(complete, server, "steady", max_tokens=60) for _ in range(4)]
        failing_futures = [
            pool.submit(server.ask, COMPLETIONS, {"max_tokens": 5, "stream": stream} | fields)
            for fields in NAN_REQUESTS
        ]
        assert [future.result() for future in futures] == [expected] * 4
        for future in failing_futures:
            status, text, _ = future.result()
            assert status == (200 if stream else 500)
            assert "is finite" in text
    assert complete(server, "steady", max_tokens=60) == expected
    assert server.wait_until(requests_active=0)["requests_waiting"] == 0
