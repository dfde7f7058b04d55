"""Tests of captured steps. A graph for CPUs (recorded_graph.py) repeats calls of the dispatcher."""

import copy
import gc
import weakref
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.overrides import TorchFunctionMode
from transformers import CompileConfig, MaxLengthCriteria

from hf_fp8kv import FP8PagedCache, PrefixStore, check_model, enable
from hf_fp8kv.attention import capture
from hf_fp8kv.attention.capture import CapturedStep, CaptureError
from hf_fp8kv.modeling.model_support import CACHE
from tests.helpers.capture_programs import check_program
from tests.helpers.planned import make_planned_scales_for, make_protected_plan_for
from tests.helpers.recorded_graph import RecordedGraph, recorded_graphs
from tests.helpers.tiny_models import build_variant

pytestmark = pytest.mark.text
NEW_TOKENS = 24
GREEDY = {
    "max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0, "eos_token_id": None,
    "return_dict_in_generate": True, "output_logits": True,
}  # fmt: skip
# Without a format, each model would be run to choose a plan.
OPTIONS = {"page_size": 8, "dtype": "fp8_e3m4"}


def generate(model: Any, inputs: Any, **keywords: Any) -> Any:
    torch.manual_seed(1)
    return model.generate(**inputs, **{**GREEDY, **keywords})


def run_captured(
    model: Any, inputs: Any, *, graph: Any = RecordedGraph, options: Any = None, **keywords: Any
) -> tuple[Any, Any]:
    """Enable captured steps. Return the output of `generate`, and its step or None."""
    enable(model, capture=True, **{**OPTIONS, **(options or {})})
    with recorded_graphs(graph) as steps:
        output = generate(model, inputs, **keywords)
    return output, steps[-1] if steps else None


def run_eagerly(model: Any, inputs: Any, options: Any = None, **keywords: Any) -> Any:
    enable(model, **{**OPTIONS, **(options or {})})
    return generate(model, inputs, **keywords)


def assert_equal(actual: Any, expected: Any) -> None:
    assert torch.equal(actual.sequences, expected.sequences)
    assert all(map(torch.equal, actual.logits, expected.logits))


def run_at(length: int, action: Callable[[], Any]) -> Callable[..., torch.Tensor]:
    """Return a criterion that runs `action` at a length, and that never ends a call."""

    def criterion(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        if ids.shape[1] == length:
            action()
        return torch.zeros(len(ids), dtype=torch.bool)

    return criterion


def compare(
    make_model: Callable[[], tuple[Any, Any]], *, graph: Any = RecordedGraph, **keywords: Any
) -> CapturedStep:
    """Assert that captured steps give the bits of eager steps, and return the step.

    `make_model` returns a new model and its inputs. The eager call is the first, so the captured
    call may read pages that the eager call has stored.
    """
    expected = run_eagerly(*make_model(), **keywords)
    actual, step = run_captured(*make_model(), graph=graph, **keywords)
    assert_equal(actual, expected)
    return step


@pytest.mark.parametrize(
    ("name", "keywords"),
    [
        ("gqa", {}),
        ("gqa", {"do_sample": True, "num_return_sequences": 2}),
        ("sliding_and_full", {}),
        pytest.param("sinks", {}, marks=pytest.mark.full),
        pytest.param("latent", {}, marks=pytest.mark.full),
        ("hybrid", {}),  # layers with a recurrent state
        ("deepseek_v32", {}),  # an indexer
        ("seq2seq/whisper", {}),
    ],
)
def test_replays_give_the_bits_of_eager_steps(name: str, keywords: Any) -> None:
    step = compare(lambda: build_variant(name), **keywords)
    assert (step.num_steps, step.num_replays) == (NEW_TOKENS - 1, NEW_TOKENS - 4), step.obstacle


def test_the_plan_of_a_model_gives_the_bits_of_eager_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plans are the default, and plans with centers, rotations, and an unrounded layer."""
    model, inputs = build_variant("gqa", num_hidden_layers=4)
    scales = make_planned_scales_for(model)
    # Of 7 steps at a time, all but three are replays, until fewer than 16 are left.
    num_few_replays = 2 * (7 - 3)
    cases: tuple[tuple[int, dict[str, Any], int], ...] = (
        (7, {"dtype": "adaptive"}, num_few_replays),
        (1024, {"plan": make_protected_plan_for(model, "K", index=1)}, NEW_TOKENS - 4),
        (7, {"plan": make_protected_plan_for(model, "K and V", index=3)}, num_few_replays),
        (1024, {"scales": scales}, NEW_TOKENS - 4),
        (7, {"scales": scales, "max_cache_len": 48}, NEW_TOKENS - 4),
    )
    for num_reserved, options, num_replays in cases:
        monkeypatch.setattr(capture, "MIN_RESERVED_TOKENS", num_reserved)
        step = compare(lambda: (model, inputs), options={"dtype": None, **options})
        assert step.num_replays == num_replays, options


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda model: model.model.layers[0].register_forward_hook(lambda *_: None), "have hooks"),
        (lambda model: vars(model.model.layers[0]).update(_hf_hook=None), "accelerate"),
        (lambda model: vars(model).update(hf_device_map={"a": 0, "b": 1}), "several devices"),
        (
            lambda model: vars(model).update(hf_quantizer=SimpleNamespace(is_compileable=False)),
            "quantizer",
        ),
        (lambda model: model.model.layers[0].compile(backend="eager"), "compiled"),
    ],
)
def test_models_that_graphs_do_not_support_run_eagerly(
    change: Callable[[Any], Any], reason: str
) -> None:
    model, _ = build_variant("gqa")
    assert capture.find_model_obstacle(model) == ""
    change(model)
    assert reason in capture.find_model_obstacle(model)


@pytest.mark.parametrize(
    ("keywords", "options"),
    [
        ({"max_new_tokens": 15}, {}),
        ({"num_beams": 2}, {}),
        ({"disable_compile": True}, {}),
        ({"prefill_chunk_size": 4}, {}),
        ({"prompt_lookup_num_tokens": 3}, {}),
        ({}, {"offloading": True}),
    ],
    ids=str,
)
def test_calls_that_are_not_captured_run_eagerly(keywords: Any, options: Any) -> None:
    model, inputs = build_variant("gqa")
    # Assisted decoding needs one sequence.
    inputs = {name: tensor[1:] for name, tensor in inputs.items()}
    expected = run_eagerly(model, inputs, options, **keywords)
    actual, step = run_captured(model, inputs, options=options, **keywords)
    assert torch.equal(actual.sequences, expected.sequences)
    assert step is None or step.num_replays == 0


def test_a_budget_without_room_for_reserved_pages_leaves_an_eager_call() -> None:
    # The call reserves pages for 100 tokens.
    step = compare(
        lambda: build_variant("gqa"), options={"max_pages": 10}, max_new_tokens=100,
        stopping_criteria=[MaxLengthCriteria(30)],
    )  # fmt: skip
    assert "max_pages" in step.obstacle


def test_an_environment_variable_turns_captures_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(capture.ENVIRONMENT_VARIABLE, "0")
    _, step = run_captured(*build_variant("gqa"))
    assert step is None


def test_a_compile_config_selects_torch_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = build_variant("gqa")
    config = CompileConfig()
    config._compile_all_devices = True
    compile_model = mock.Mock(side_effect=lambda forward, **_: forward)
    monkeypatch.setattr(torch, "compile", compile_model)
    _, step = run_captured(model, inputs, options={"max_cache_len": 48}, compile_config=config)
    assert step is None
    assert compile_model.call_count == 1


# Steps that a graph cannot repeat. Each function changes the input of an MLP.
def read_value(mlp: Any, states: torch.Tensor) -> torch.Tensor:
    return states * (1 if float(states.sum()) < 1e9 else 2)


def choose_rows(mlp: Any, states: torch.Tensor) -> torch.Tensor:
    return states + states[states > 1e9].sum()


def count_in_python(mlp: Any, states: torch.Tensor) -> torch.Tensor:
    mlp.count = getattr(mlp, "count", 0) + 1
    return states + 1e-3 * mlp.count


def make_constant(mlp: Any, states: torch.Tensor) -> torch.Tensor:
    mlp.count = getattr(mlp, "count", 0) + 1
    return states + torch.tensor([1e-3 * mlp.count])


def replace_state(mlp: Any, states: torch.Tensor) -> torch.Tensor:
    mlp.state = getattr(mlp, "state", 0 * states[:, -1:]) * 0.5 + states[:, -1:]
    return states + mlp.state


def drop_values(mlp: Any, states: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.dropout(states, 0.1)


def alternate_calls(mlp: Any, states: torch.Tensor) -> torch.Tensor:
    mlp.count = getattr(mlp, "count", 0) + 1
    return states * 2 if mlp.count % 2 else states.neg()


def build_changed(change: Callable[..., torch.Tensor]) -> tuple[Any, Any]:
    """Return a model and its inputs. `change` changes the input of the first MLP."""
    model, inputs = build_variant("gqa")
    model.__class__ = type(f"Renamed{change.__name__}", (type(model),), {})
    mlp = model.model.layers[0].mlp
    forward = mlp.forward
    mlp.forward = lambda states: forward(change(mlp, states))
    return model, inputs


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (read_value, "reads a value on the host"),
        (choose_rows, "shape depends on values"),
        (count_in_python, "aten.add"),
        (make_constant, "aten.lift_fresh"),
        (replace_state, "different memory"),
        (drop_values, "draws random numbers"),
        (alternate_calls, "where the previous step calls"),
    ],
)
def test_a_step_that_a_graph_cannot_repeat_runs_eagerly(
    change: Callable[..., torch.Tensor], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("WARNING"):
        step = compare(lambda: build_changed(change))
    assert step.num_replays == 0
    assert reason in step.obstacle
    assert step.obstacle in caplog.text


def test_check_model_reports_why_a_step_is_not_captured() -> None:
    assert check_model(build_variant("gqa")[0]).capture_obstacle == ""
    report = check_model(build_changed(read_value)[0])
    assert "reads a value on the host" in report.capture_obstacle
    assert report.capture_obstacle in str(report)


def test_a_model_that_needs_a_growing_cache_runs_eagerly() -> None:
    """The first step on reserved pages fails after some layers have changed their states."""

    def make_model() -> tuple[Any, Any]:
        model, inputs = build_variant("hybrid")
        layer = model.model.layers[-1]
        forward = layer.forward

        def check(*args: Any, **kwargs: Any) -> Any:
            output = forward(*args, **kwargs)
            if kwargs[CACHE].is_compileable:
                raise RuntimeError("expected a growing cache")
            return output

        vars(layer)["forward"] = check
        return model, inputs

    assert "expected a growing cache" in compare(make_model).obstacle


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("gpt_neo", "reads dense keys"),  # ignores the mask of positions without tokens
        ("seq2seq/nllb-moe", "results differ"),  # uses the mask to choose experts
    ],
)
def test_models_that_differ_with_a_preallocated_cache_run_eagerly(name: str, reason: str) -> None:
    assert reason in compare(lambda: build_variant(name)).obstacle


class FailingGraph(RecordedGraph):
    def capture(self, run: Callable[[], Any]) -> Any:
        raise CaptureError("a stream is invalid")


def test_a_failed_capture_leaves_an_eager_call() -> None:
    step = compare(lambda: build_variant("gqa"), graph=FailingGraph, do_sample=True)
    assert step.obstacle == "a stream is invalid"


def test_an_exception_in_a_processor_leaves_a_growing_cache() -> None:
    model, inputs = build_variant("gqa")
    cache = FP8PagedCache(model.config, **OPTIONS)

    def fail(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] == 25:
            raise ValueError("stop")
        return logits

    with pytest.raises(ValueError, match="stop"):
        run_captured(model, inputs, past_key_values=cache, logits_processor=[fail])
    assert not cache.is_compileable
    assert cache.host_length() == cache.fork().host_length() == 25
    cache.reset()
    actual, step = run_captured(model, inputs, past_key_values=cache)
    assert_equal(actual, run_eagerly(model, inputs))
    assert step.num_replays > 0


@pytest.mark.parametrize("operation", ["fork", "save", "reorder"])
def test_a_cache_that_changes_between_steps_is_captured_again(
    operation: str, tmp_path: Path
) -> None:
    model, inputs = build_variant("gqa")
    cache = FP8PagedCache(model.config, **OPTIONS)
    copies: list[Any] = []
    actions: dict[str, Callable[[], Any]] = {
        "fork": lambda: copies.append(cache.fork()),
        "save": lambda: copies.append(FP8PagedCache.load(cache.save(tmp_path / "cache"))),
        "reorder": lambda: cache.reorder_cache(torch.tensor([0, 1])),
    }
    expected = run_eagerly(model, inputs, max_new_tokens=48)
    actual, step = run_captured(
        model, inputs, past_key_values=cache, max_new_tokens=48,
        stopping_criteria=[run_at(25, actions[operation])],
    )  # fmt: skip
    assert_equal(actual, expected)
    # The step after the change is eager. Then two steps are described, and a third is captured.
    assert step.num_replays == 47 - 3 - 4
    assert all(copied_cache.host_length() == 24 for copied_cache in copies)


def test_a_preallocated_cache_that_swaps_sequences_is_captured_again() -> None:
    """The states of recurrent layers get new addresses, and the pages keep theirs."""
    model, inputs = build_variant("hybrid")

    def run(call: Callable[..., Any]) -> Any:
        cache = FP8PagedCache(model.config, **OPTIONS, max_cache_len=64)
        swap = run_at(25, lambda: cache.reorder_cache(torch.tensor([1, 0])))
        return call(model, inputs, past_key_values=cache, stopping_criteria=[swap])

    actual, step = run(run_captured)
    assert_equal(actual, run(run_eagerly))
    assert step.num_replays == NEW_TOKENS - 1 - 6


def test_threads_have_their_own_graphs() -> None:
    """A copy of a model has its own captured steps."""
    model, inputs = build_variant("gqa")
    prompts = [inputs, {name: tensor.flip(0) for name, tensor in inputs.items()}]
    expected = [run_eagerly(model, prompt) for prompt in prompts]
    model = copy.deepcopy(enable(model, capture=True, **OPTIONS))
    with recorded_graphs() as steps, ThreadPoolExecutor(2) as pool:
        outputs = list(pool.map(lambda prompt: generate(model, prompt), prompts))
    for output, expected_output in zip(outputs, expected, strict=True):
        assert torch.equal(output.sequences, expected_output.sequences)
    assert [step.num_replays for step in steps] == [NEW_TOKENS - 4] * 2


def test_a_prefix_store_works_with_captured_steps(tmp_path: Path) -> None:
    """The captured call restores the pages that the eager call has stored."""
    store = PrefixStore(tmp_path)
    step = compare(
        lambda: build_variant("gqa"), options={"prefix_store": store, "prefill": "stored"}
    )
    assert step.num_replays == NEW_TOKENS - 4
    assert store.usage().tokens_found > 0


def test_a_graph_is_freed_with_its_call() -> None:
    references = []

    class Graph(RecordedGraph):
        def __init__(self) -> None:
            super().__init__()
            references.append(weakref.ref(self))

    model, inputs = build_variant("gqa")
    run_captured(model, inputs, graph=Graph)
    gc.collect()
    assert len(references) == 1
    assert references[0]() is None


@pytest.mark.parametrize(
    "seeds", [range(2), pytest.param(range(2, 40), marks=pytest.mark.full)], ids=len
)
def test_random_programs_give_equal_results(seeds: range) -> None:
    counts = Counter[str]()
    problems = [check_program(seed, counts) for seed in seeds]
    assert not any(problems), "\n".join(filter(None, problems))
    if len(seeds) > 2:
        assert counts["replays"] > 0.7 * counts["steps"]


def test_a_call_captures_again_after_its_cache_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each capture reserves pages for 17 tokens. Between two captures, the cache is growing."""
    monkeypatch.setattr(capture, "MIN_RESERVED_TOKENS", 17)
    model, inputs = build_variant("sliding_and_full")

    def chat(run: Callable[..., Any]) -> Any:
        first_output = run(model, inputs, max_new_tokens=60)
        cache = first_output[CACHE]
        ids = torch.cat([first_output.sequences, first_output.sequences[:, -3:]], 1)

        def check_batch(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            assert cache._paged.batch == len(ids)
            return torch.zeros(len(ids), dtype=torch.bool)

        next_output = run(
            model, {"input_ids": ids}, max_new_tokens=40, past_key_values=cache,
            stopping_criteria=[check_batch],
        )  # fmt: skip
        assert not cache.is_compileable
        states = []
        for layer in cache.paged_layers:
            states += [layer.keys.dense(), layer.values.dense()]
        return SimpleNamespace(
            outputs=[first_output, next_output], length=cache.host_length(), states=states,
            used_bytes=cache.memory_footprint().used_bytes,
        )  # fmt: skip

    expected = chat(run_eagerly)
    steps: list[CapturedStep] = []

    def run(*args: Any, **keywords: Any) -> Any:
        output, step = run_captured(*args, **keywords)
        steps.append(step)
        return output

    actual = chat(run)
    for output, expected_output in zip(actual.outputs, expected.outputs, strict=True):
        assert_equal(output, expected_output)
    assert actual.length == expected.length
    # Pages that have left a window are freed after the call.
    assert actual.used_bytes <= expected.used_bytes
    assert all(map(torch.equal, actual.states, expected.states))
    # Of 17 steps at a time, all but three are replays. The last 15 steps are not captured.
    assert [step.num_replays for step in steps] == [14 * 3, 14 * 2]


@pytest.mark.parametrize("num_reserved", [64, pytest.param(1024, marks=pytest.mark.full)])
def test_reserved_pages_are_bounded(num_reserved: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound is 1.15 times the pages of all tokens, including the reserved tokens."""
    monkeypatch.setattr(capture, "MIN_RESERVED_TOKENS", num_reserved)
    model, _ = build_variant("gqa", max_position_embeddings=4096)
    cache = FP8PagedCache(model.config, **OPTIONS)
    page_counts: list[int] = []

    def count_pages(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        page_counts.append(sum(len(layer.pool.blocks) for layer in cache._paged.layers))
        return torch.zeros(len(ids), dtype=torch.bool)

    prompt = {"input_ids": torch.arange(600).reshape(2, 300) % 90 + 1}
    _, step = run_captured(
        model, prompt, past_key_values=cache, max_new_tokens=120, stopping_criteria=[count_pages]
    )
    assert step.num_replays > 100
    num_pages = 2 * 2 * (420 + num_reserved) / 8  # of two layers and two sequences
    assert max(page_counts) <= 1.15 * num_pages


def test_a_replay_calls_few_functions_of_torch() -> None:
    """The test counts calls before the replay, except reads of shapes and devices."""
    calls_by_step: list[list[str]] = []
    calls_before_replays: list[list[str]] = []

    class CallRecorder(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            if getattr(func, "__name__", "") != "__get__":
                calls_by_step[-1].append(str(func))
            return func(*args, **(kwargs or {}))

    class Graph(RecordedGraph):
        def replay(self) -> None:
            calls_before_replays.append(calls_by_step[-1].copy())
            super().replay()

    model, inputs = build_variant("sliding_and_full")
    enable(model, capture=True, **OPTIONS)
    call = CapturedStep.__call__

    def record_calls(step: CapturedStep, **keywords: Any) -> Any:
        calls_by_step.append([])
        with CallRecorder():
            return call(step, **keywords)

    with pytest.MonkeyPatch.context() as patch, recorded_graphs(Graph):
        patch.setattr(CapturedStep, "__call__", record_calls)
        generate(model, inputs)
    assert len(calls_before_replays) == NEW_TOKENS - 4
    assert max(map(len, calls_before_replays)) <= 6, calls_before_replays[-1]
