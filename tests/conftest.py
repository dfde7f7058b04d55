"""Set up all tests: no network, a new HF_HOME, fixed seeds, threads, devices, and two tiers.

`make test` runs the fast tier, which tests every behavior once. Tests marked `full` only run in
`make test-all`. Tests marked `gpu` need a GPU that torch finds.
"""

import gc
import os
from pathlib import Path

from tests.helpers import hf_home

# huggingface_hub and transformers read this variable when they are imported, so it is set first.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# torch reads this variable when it is imported. Threads that spin make tests of tiny models up to
# eight times slower on a busy machine.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Starting a pool of compiler processes takes longer than compiling the tests' models.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# Compiled kernels persist between runs, because Triton keys them by their source code.
os.environ.setdefault("TRITON_CACHE_DIR", str(Path(__file__).parents[1] / "build/cache/triton"))

import random
from collections.abc import Iterator

import hypothesis
import numpy as np
import pytest
import torch

from tests.helpers.style import pytest_runtest_makereport  # noqa: F401

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    # Triton reads this variable when torch imports it later. Kernels then run in Triton's
    # interpreter, on CPU tensors.
    os.environ.setdefault("TRITON_INTERPRET", "1")
# The workers of pytest-xdist share the cores.
_IS_WORKER = "PYTEST_XDIST_WORKER" in os.environ
NUM_THREADS = int(os.environ.get("OMP_NUM_THREADS") or (1 if _IS_WORKER else 2))

# Examples have no time limits, because the first example may compile a kernel. CI draws the same
# examples in every run. The profiles set the number of examples, not the tests. Only the full
# profile shrinks failures, which takes minutes. `make test` uses the fast profile.
_IS_CI = bool(os.environ.get("CI"))
for _name, _max_examples, _max_steps in (("fast", 25, 20), ("full", 60, 30)):
    hypothesis.settings.register_profile(
        _name,
        deadline=None,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
        derandomize=_IS_CI,
        print_blob=_IS_CI,
        max_examples=_max_examples,
        stateful_step_count=_max_steps,
        phases=[phase for phase in hypothesis.Phase if _name == "full" or phase.name != "shrink"],
    )


def pytest_unconfigure() -> None:
    hf_home.remove_folder()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests that need a GPU on a machine without a GPU."""
    skip_mark = pytest.mark.skip(reason="needs a GPU, and torch finds none")
    for item in items:
        if item.get_closest_marker("gpu") and not HAS_GPU:
            item.add_marker(skip_mark)


def _list_devices() -> list[object]:
    return ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)] if HAS_GPU else ["cpu"]


@pytest.fixture(params=_list_devices())
def device(request: pytest.FixtureRequest) -> torch.device:
    """Return the CPU, and then the GPU if torch finds one. The test on the GPU is marked gpu."""
    return torch.device(request.param)


@pytest.fixture(scope="session")
def interpreted() -> None:
    """Repair Triton's interpreter, so that kernels compute the same as on a GPU."""
    if os.environ.get("TRITON_INTERPRET", "0") == "1":
        from tests.helpers.interpreter import repair

        repair()


@pytest.fixture
def poisoned_outputs() -> Iterator[None]:
    """Fill the tensors that torch.empty allocates with NaN, or with the largest integer."""
    was_filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.utils.deterministic.fill_uninitialized_memory = was_filled
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Discard compiled graphs and their counts before a test, and the graphs after it."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def no_garbage_collection() -> Iterator[None]:
    """Disable the garbage collector, so that only references keep objects alive."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def _freeze_objects() -> None:
    """Exclude objects of earlier modules from garbage collection, which each engine runs twice."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _set_threads_of_fixtures() -> None:
    torch.set_num_threads(NUM_THREADS)


@pytest.fixture(autouse=True)
def _set_seeds_and_threads() -> None:
    torch.set_num_threads(NUM_THREADS)
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _remove_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove COLUMNS, which pytest-xdist sets to 80, so that output has its default width."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture(autouse=True)
def _restore_default_dtype() -> Iterator[None]:
    old_dtype = torch.get_default_dtype()
    yield
    torch.set_default_dtype(old_dtype)


@pytest.fixture(scope="session")
def demo_model_path() -> Path:
    """Return the folder of the demo model (SmolLM2-135M-Instruct, bf16), converted on first use."""
    from huggingface_hub import constants

    from hf_fp8kv.errors import ConfigError
    from hf_fp8kv.utils import demo_model

    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(constants, "HF_HOME", hf_home.ORIGINAL_HF_HOME)
            path = demo_model.demo_model_path()
        hf_home.link_models()
        return path
    except ConfigError as error:
        if os.environ.get("CI"):
            raise  # CI installs the model, and a skip would hide half of the tests
        pytest.skip(str(error))
