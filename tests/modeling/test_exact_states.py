"""Tests of models whose K and V compressed-tensors rounds: caches get the unrounded K and V.

`original` is a model without a declared KV cache. `declared` has equal weights, and declares a KV
cache whose scales are much too small.
"""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from transformers import DynamicCache, StaticCache

import hf_fp8kv
from hf_fp8kv import FP8PagedCache, KVScales, calibrate, check_model, serving
from hf_fp8kv.modeling import exact_states as exact_states_module
from hf_fp8kv.modeling.exact_states import ROUNDING_NOTE, describe_rounding, exact_states
from hf_fp8kv.modeling.model_support import CACHE
from tests.helpers.declared import (
    TOO_SMALL,
    declare,
    declare_output_scales,
    load,
    save_plain,
    save_w8a8,
)
from tests.helpers.divergence import compare_caches
from tests.helpers.serving_tools import draw_prompts, generate_batch

pytest.importorskip("compressed_tensors")
pytestmark = [pytest.mark.text, pytest.mark.filterwarnings("ignore")]
needs_rounding = pytest.mark.skipif(
    CACHE == "cache", reason="compressed-tensors 0.20 rounds nothing with transformers 5.24"
)

IDS = torch.randint(3, 99, (2, 65), generator=torch.Generator().manual_seed(2))


@pytest.fixture(scope="module")
def dense_folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("dense")
    original_folder = save_plain(root / "original")
    return original_folder, declare(original_folder, root / "declared")


@pytest.fixture(scope="module")
def w8a8_folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("w8a8")
    original_folder = save_w8a8(root / "original")
    return original_folder, declare(original_folder, root / "declared")


@pytest.fixture
def models(dense_folders):
    return tuple(load(folder) for folder in dense_folders)


@pytest.fixture
def original(models):
    return models[0]


@pytest.fixture
def declared(models):
    return models[1]


@torch.no_grad()
def run_model(model: Any, cache: Any) -> list[torch.Tensor]:
    chunks = (IDS[:, :63], *IDS[:, 63:].split(1, 1))
    return [model(chunk, past_key_values=cache).logits for chunk in chunks]


def assert_same(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(actual) == len(expected)
    assert all(map(torch.equal, actual, expected))


def restore_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = exact_states_module._find_wrapper_class().forward
    wrapped = getattr(forward, "__wrapped__", forward)
    monkeypatch.setattr(exact_states_module._find_wrapper_class(), "forward", wrapped)


def differ_clearly(logits: list[torch.Tensor], other_logits: list[torch.Tensor]) -> bool:
    return all(
        (row - other_row).abs().max() > 0.3
        for row, other_row in zip(logits, other_logits, strict=True)
    )


@needs_rounding
@pytest.mark.parametrize(
    ("weights", "attention"),
    [("dense", "fp8_paged"), ("dense", "sdpa"), ("dense", "eager"), ("w8a8", "fp8_paged")],
)
def test_a_cache_gets_k_and_v_of_the_original_weights(request, weights, attention):
    original_folder, declared_folder = request.getfixturevalue(f"{weights}_folders")
    original, declared = load(original_folder, attention), load(declared_folder, attention)
    assert describe_rounding(declared) == ROUNDING_NOTE
    assert not describe_rounding(original)
    rounded_logits = run_model(declared, DynamicCache(config=declared.config))
    exact_logits = run_model(original, DynamicCache(config=original.config))
    assert differ_clearly(rounded_logits, exact_logits)
    all_options: list[dict[str, Any]] = [
        {"page_size": 16}, {"page_size": 16, "prefill": "stored"}, {"dtype": "auto"},
        {"scales": TOO_SMALL}, {"skip_layers": [1]}, {"max_cache_len": 80},
    ]  # fmt: skip
    for options in all_options:
        expected = run_model(original, FP8PagedCache(original.config, **options))
        assert_same(run_model(declared, FP8PagedCache(declared.config, **options)), expected)
    # The prefill is exact, so logits equal the original weights' logits without quantization.
    assert torch.equal(run_model(declared, FP8PagedCache(declared.config))[0], exact_logits[0])
    # A cache of transformers still gets rounded K and V, even after a cache of this package.
    assert torch.equal(declared(IDS[:, :63], use_cache=False).logits, rounded_logits[0])
    assert_same(run_model(declared, DynamicCache(config=declared.config)), rounded_logits)


def test_a_cache_may_be_created_before_compressed_tensors_is_imported(
    original, declared, monkeypatch
):
    expected = run_model(original, FP8PagedCache(original.config, dtype="fp8"))
    restore_forward(monkeypatch)
    with monkeypatch.context() as patch:
        patch.delitem(exact_states_module.sys.modules, "compressed_tensors.modeling.kvcache")
        caches = [FP8PagedCache(config, dtype="fp8") for config in (None, declared.config)]
    for cache in caches:
        restore_forward(monkeypatch)
        assert_same(run_model(declared, cache), expected)


@needs_rounding
def test_a_warning_and_the_report_note_the_rounding(original, declared, caplog, monkeypatch):
    monkeypatch.setattr("hf_fp8kv.utils.warn_once._logged_messages", set())
    run_model(original, FP8PagedCache(original.config))
    run_model(declared, DynamicCache(config=declared.config))
    assert Counter(caplog.messages)[ROUNDING_NOTE] == 0
    for _ in range(2):
        run_model(declared, FP8PagedCache(declared.config))
    assert Counter(caplog.messages)[ROUNDING_NOTE] == 1
    original_report, report = check_model(original), check_model(declared)
    assert original_report.note == ""
    assert "hooks" in report.capture_obstacle
    assert report.to_dict() == {
        **original_report.to_dict(), "note": ROUNDING_NOTE,
        "capture_obstacle": report.capture_obstacle,
    }  # fmt: skip
    assert ROUNDING_NOTE in str(report)


@needs_rounding
def test_a_warning_notes_rounded_outputs_of_projections(
    dense_folders, tmp_path, caplog, monkeypatch
):
    folder = declare_output_scales(dense_folders[0], tmp_path / "old")
    model, original = load(folder), load(dense_folders[0])
    note = describe_rounding(model)
    assert "k_proj and v_proj" in note
    assert check_model(model).note == note
    texts = [row.tolist() for row in IDS[:, :40]]
    calls = (
        lambda: hf_fp8kv.enable(model),
        lambda: serving.enable(model, probe=False),
        lambda: calibrate(model, texts, progress=False),
    )
    for call in calls:
        monkeypatch.setattr("hf_fp8kv.utils.warn_once._logged_messages", set())
        caplog.clear()
        call()
        assert Counter(caplog.messages)[note] == 1
    exact_logits = run_model(original, FP8PagedCache(original.config))
    assert differ_clearly(run_model(model, FP8PagedCache(model.config)), exact_logits)
    # The remedy that the message names removes the rounding.
    KVScales.from_pretrained(folder).save_pretrained(
        tmp_path / "copy", format="compressed-tensors", checkpoint=folder, overwrite=True
    )
    copied_model = load(tmp_path / "copy")
    assert describe_rounding(copied_model) == ROUNDING_NOTE
    assert_same(run_model(copied_model, FP8PagedCache(copied_model.config)), exact_logits)


def test_calibration_and_scores_use_unrounded_k_and_v(original, declared):
    texts = [row.tolist() for row in torch.randint(3, 99, (6, 40), generator=torch.Generator())]
    expected = calibrate(original, texts, max_length=40, progress=False)
    actual = calibrate(declared, texts, max_length=40, progress=False)
    assert actual.digest == expected.digest
    for index, layer in actual.layers.items():
        assert (layer.k > 2 * TOO_SMALL.layers[index].k).all()
    factories = {"static": lambda: FP8PagedCache(original.config, scales=TOO_SMALL)}
    expected_kl = compare_caches(original, IDS, factories, num_prefill=40)["static"].kl
    kl = compare_caches(declared, IDS, factories, num_prefill=40)["static"].kl
    assert torch.equal(kl, expected_kl)
    assert kl.mean() > 1e-3


@needs_rounding
def test_serving_gives_the_answers_of_the_original_weights(models, declared):
    prompts = draw_prompts()[:4]
    answers = []
    for model in models:
        serving.enable(model)
        answers.append(generate_batch(model, prompts))
        model.destroy_cached_continuous_batching_manager()
        serving.disable(model)
    assert answers[0] == answers[1]
    prompt = torch.tensor(prompts[1:2])
    rounded_tokens = declared.generate(prompt, max_new_tokens=24, pad_token_id=0)
    assert rounded_tokens[0, prompt.shape[1] :].tolist() != answers[1][1]


@needs_rounding
def test_exact_states_do_not_affect_other_threads(declared):
    rounded_logits = run_model(declared, DynamicCache(config=declared.config))
    with exact_states():
        with exact_states():
            pass
        exact_logits = run_model(declared, DynamicCache(config=declared.config))
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(run_model, declared, DynamicCache(config=declared.config))
    with pytest.raises(KeyError), exact_states():
        raise KeyError
    assert differ_clearly(exact_logits, rounded_logits)
    assert_same(future.result(), rounded_logits)
    assert_same(run_model(declared, DynamicCache(config=declared.config)), rounded_logits)


@torch.no_grad()
@pytest.mark.usefixtures("fresh_compiler")
def test_a_compiled_step_gives_the_logits_of_the_original_weights(models):
    original, declared = models
    for model in models:
        model.set_attn_implementation("fp8_paged")
    caches = [FP8PagedCache(model.config, max_cache_len=80) for model in models]
    expected = run_model(original, caches[0])

    declared(IDS[:, :63], past_key_values=caches[1])
    # Before 0.20, hooks of compressed-tensors cannot be compiled without graph breaks.
    fullgraph = "__getattr__" in vars(exact_states_module._find_wrapper_class())
    step = torch.compile(declared, fullgraph=fullgraph, backend="aot_eager")
    for position, expected_logits in zip((63, 64), expected[1:], strict=True):
        logits = step(IDS[:, position : position + 1], past_key_values=caches[1]).logits
        torch.testing.assert_close(logits, expected_logits)


def test_other_caches_and_calls_without_a_cache_are_unchanged(declared, monkeypatch):
    @torch.no_grad()
    def run_all() -> list[torch.Tensor]:
        dynamic_logits = run_model(declared, DynamicCache(config=declared.config))
        static_logits = run_model(declared, StaticCache(config=declared.config, max_cache_len=80))
        return [declared(IDS, use_cache=False).logits, *dynamic_logits, *static_logits]

    run_model(declared, FP8PagedCache(declared.config))
    expected = run_all()
    restore_forward(monkeypatch)
    assert_same(run_all(), expected)
