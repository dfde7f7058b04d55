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

import pytest
import torch
from torch.overrides import TorchFunctionMode
from transformers import CompileConfig, MaxLengthCriteria

from hf_fp8kv import FP8PagedCache, PrefixStore, check_model, enable
from hf_fp8kv.attention import capture
from hf_fp8kv.attention.capture import CapturedStep, CaptureError
from hf_fp8kv.modeling.model_support import CACHE
from tests.helpers.capture_programs import check_program
from tests.helpers.planned import planned_scales_for, protected_plan_for
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
    make: Callable[[], tuple[Any, Any]], *, graph: Any = RecordedGraph, **keywords: Any
) -> CapturedStep:
    """Assert that captured steps give the bits of eager steps, and return the step.

    `make` returns a new model and its inputs.
    """
    expected = run_eagerly(*make(), **keywords)
    actual, step = run_captured(*make(), graph=graph, **keywords)
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
    assert (step.num_steps, step.num_replays) == (NEW_TOKENS - 1, NEW_TOKENS - 4), step.reason


def test_the_plan_of_a_model_gives_the_bits_of_eager_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plans are the default, and plans with centers, rotations, and an unrounded layer."""
    model, inputs = build_variant("gqa", num_hidden_layers=4)
    static = planned_scales_for(model)
    for growth, options in (
        (7, {"dtype": "adaptive"}),
        (1024, {"dtype": None, "plan": protected_plan_for(model, "K", layer=1)}),
        (7, {"dtype": None, "plan": protected_plan_for(model, "K and V", layer=3)}),
        (1024, {"dtype": None, "scales": static}),
        (7, {"dtype": None, "scales": static, "max_cache_len": 48}),
    ):
        monkeypatch.setattr(capture, "MIN_RESERVED_TOKENS", growth)
        step = compare(lambda: (model, inputs), options=options)
        is_long = growth > NEW_TOKENS or "max_cache_len" in options
        # Of 7 steps at a time, all but three are replays, until fewer than 16 are left.
        assert step.num_replays == (NEW_TOKENS - 4 if is_long else 2 * 4), options


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda x: x.model.layers[0].register_forward_hook(lambda *_: None), "have hooks"),
        (lambda x: vars(x.model.layers[0]).update(_hf_hook=None), "accelerate"),
        (lambda x: vars(x).update(hf_device_map={"a": 0, "b": 1}), "several devices"),
        (lambda x: vars(x).update(hf_quantizer=SimpleNamespace(is_compileable=False)), "quantizer"),
        (lambda x: x.model.layers[0].compile(backend="eager"), "compiled"),
    ],
)
def test_models_that_graphs_do_not_support_run_eagerly(
    change: Callable[[Any], Any], reason: str
) -> None:
    model, _ = build_variant("gqa")
    assert capture.find_refusal(model) == ""
    change(model)
    assert reason in capture.find_refusal(model)


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
    keywords = {"max_new_tokens": 100, "stopping_criteria": [MaxLengthCriteria(30)]}
    step = compare(lambda: build_variant("gqa"), options={"max_pages": 10}, **keywords)
    assert "max_pages" in step.reason


def test_an_environment_variable_turns_captures_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(capture.ENVIRONMENT_VARIABLE, "0")
    _, step = run_captured(*build_variant("gqa"))
    assert step is None


def test_a_compile_config_selects_torch_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = build_variant("gqa")
    config = CompileConfig()
    config._compile_all_devices = True
    compiled: list[Any] = []
    monkeypatch.setattr(torch, "compile", lambda forward, **_: compiled.append(forward) or forward)
    _, step = run_captured(model, inputs, options={"max_cache_len": 48}, compile_config=config)
    assert step is None
    assert len(compiled) == 1


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
    def make_model() -> tuple[Any, Any]:
        model, inputs = build_variant("gqa")
        model.__class__ = type(f"Renamed{change.__name__}", (type(model),), {})
        mlp = model.model.layers[0].mlp
        forward = mlp.forward
        mlp.forward = lambda x: forward(change(mlp, x))
        return model, inputs

    with caplog.at_level("WARNING"):
        step = compare(make_model)
    assert step.num_replays == 0
    assert reason in step.reason
    assert step.reason in caplog.text


def test_check_model_reports_why_a_step_is_not_captured() -> None:
    model, _ = build_variant("gqa")
    assert check_model(model).capture_obstacle == ""
    mlp = model.model.layers[0].mlp
    forward = mlp.forward
    mlp.forward = lambda x: forward(read_value(mlp, x))
    report = check_model(model)
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

    assert "expected a growing cache" in compare(make_model).reason


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("gpt_neo", "reads dense keys"),  # ignores the mask of positions without tokens
        ("seq2seq/nllb-moe", "results differ"),  # uses the mask to choose experts
    ],
)
def test_models_that_differ_with_a_preallocated_cache_run_eagerly(name: str, reason: str) -> None:
    assert reason in compare(lambda: build_variant(name)).reason


class FailingGraph(RecordedGraph):
    def capture(self, run: Callable[[], Any]) -> Any:
        raise CaptureError("a stream is invalid")


def test_a_failed_capture_leaves_an_eager_call() -> None:
    step = compare(lambda: build_variant("gqa"), graph=FailingGraph, do_sample=True)
    assert step.reason == "a stream is invalid"


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
    expected = run_eagerly(model, inputs)
    cache.reset()
    actual, step = run_captured(model, inputs, past_key_values=cache)
    assert_equal(actual, expected)
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
    criteria = [run_at(25, actions[operation])]
    keywords = {"past_key_values": cache, "stopping_criteria": criteria, "max_new_tokens": 48}
    actual, step = run_captured(model, inputs, **keywords)
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

    expected = run(run_eagerly)
    actual, step = run(run_captured)
    assert_equal(actual, expected)
    assert step.num_replays == NEW_TOKENS - 1 - 6


def test_threads_have_their_own_graphs() -> None:
    """A copy of a model has its own captured steps."""
    model, inputs = build_variant("gqa")
    prompts = [{name: tensor.roll(i, 0) for name, tensor in inputs.items()} for i in range(2)]
    expected = [run_eagerly(model, prompt) for prompt in prompts]
    model = copy.deepcopy(enable(model, capture=True, **OPTIONS))
    with recorded_graphs() as steps, ThreadPoolExecutor(2) as pool:
        outputs = [*pool.map(lambda prompt: generate(model, prompt), prompts)]
    for output, expected_output in zip(outputs, expected, strict=True):
        assert torch.equal(output.sequences, expected_output.sequences)
    assert [step.num_replays for step in steps] == [NEW_TOKENS - 4] * 2


def test_a_prefix_store_works_with_captured_steps(tmp_path: Path) -> None:
    """The captured call restores the pages that the eager call has stored."""
    store = PrefixStore(tmp_path)
    options = {"prefix_store": store, "prefill": "stored"}
    step = compare(lambda: build_variant("gqa"), options=options)
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
    problems = [problem for seed in seeds if (problem := check_program(seed, counts))]
    assert not problems, "\n".join(problems)
    if len(seeds) > 2:
        assert counts["replays"] > 0.7 * counts["steps"]


def test_a_call_captures_again_after_its_cache_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each capture reserves pages for 17 tokens. Between two captures, the cache is growing."""
    monkeypatch.setattr(capture, "MIN_RESERVED_TOKENS", 17)
    model, inputs = build_variant("sliding_and_full")
    sizes: list[int] = []

    def chat(run: Callable[..., Any]) -> list[Any]:
        first_result = run(model, inputs, max_new_tokens=60)
        cache = first_result[CACHE]
        ids = torch.cat([first_result.sequences, first_result.sequences[:, -3:]], 1)
        next_result = run(
            model, {"input_ids": ids}, max_new_tokens=40, past_key_values=cache,
            stopping_criteria=[lambda *_, **__: bool(sizes.append(cache._paged.batch))],
        )  # fmt: skip
        assert not cache.is_compileable
        states = [
            handle.dense() for layer in cache.paged_layers for handle in (layer.keys, layer.values)
        ]
        used_bytes = cache.memory_footprint().used_bytes
        return [first_result, next_result, cache.host_length(), used_bytes, states]

    *expected, states = chat(run_eagerly)
    steps: list[CapturedStep] = []

    def run(*args: Any, **keywords: Any) -> Any:
        output, step = run_captured(*args, **keywords)
        steps.append(step)
        return output

    *actual, captured_states = chat(run)
    for actual_result, expected_result in zip(actual[:2], expected[:2], strict=True):
        assert_equal(actual_result, expected_result)
    assert actual[2] == expected[2]
    assert actual[3] <= expected[3]  # pages that have left a window are freed after the call
    assert all(map(torch.equal, captured_states, states))
    # Of 17 steps at a time, all but three are replays. The last 15 steps are not captured.
    assert [step.num_replays for step in steps] == [14 * 3, 14 * 2]


@pytest.mark.parametrize("growth", [64, pytest.param(1024, marks=pytest.mark.full)])
def test_reserved_bytes_are_bounded(growth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound is 1.15 times the pages of all tokens, including the reserved tokens."""
    monkeypatch.setattr(capture, "MIN_RESERVED_TOKENS", growth)
    model, _ = build_variant("gqa", max_position_embeddings=4096)
    cache = FP8PagedCache(model.config, **OPTIONS)
    sizes: list[int] = []

    def measure(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        sizes.append(sum(len(store.pool.blocks) for store in cache._paged.stores))
        return torch.zeros(len(ids), dtype=torch.bool)

    prompt = {"input_ids": torch.arange(600).reshape(2, 300) % 90 + 1}
    keywords = {"stopping_criteria": [measure], "past_key_values": cache, "max_new_tokens": 120}
    _, step = run_captured(model, prompt, **keywords)
    assert step.num_replays > 100
    num_pages = 2 * 2 * (420 + growth) / 8  # of two layers and two sequences
    assert max(sizes) <= 1.15 * num_pages


def test_a_replay_calls_few_functions_of_torch() -> None:
    """The test counts calls before the replay, except reads of shapes and devices."""
    names: list[list[str]] = []
    names_before_replays: list[list[str]] = []

    class CallRecorder(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            if getattr(func, "__name__", "") != "__get__":
                names[-1].append(str(func))
            return func(*args, **(kwargs or {}))

    class Graph(RecordedGraph):
        def replay(self) -> None:
            names_before_replays.append(names[-1].copy())
            super().replay()

    model, inputs = build_variant("sliding_and_full")
    enable(model, capture=True, **OPTIONS)
    call = CapturedStep.__call__

    def count(step: CapturedStep, **keywords: Any) -> Any:
        names.append([])
        with CallRecorder():
            return call(step, **keywords)

    with pytest.MonkeyPatch.context() as patch, recorded_graphs(Graph):
        patch.setattr(CapturedStep, "__call__", count)
        generate(model, inputs)
    assert len(names_before_replays) == NEW_TOKENS - 4
    assert max(map(len, names_before_replays)) <= 6, names_before_replays[-1]
