"""What every test starts from: no network, the same random numbers, two threads, and a device.

RUN_SLOW=1 also runs the tests marked slow. Tests marked gpu run where torch finds a device.
"""

import gc
import os

# Read by huggingface_hub and transformers when they are imported, hence before everything else.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Read when torch is imported. Threads that wait by spinning make a suite of tiny models up to eight
# times slower on a machine that is busy with something else.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# A pool of processes that compile takes longer to start than what these tests compile.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import random
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import numpy as np
import pytest
import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    # Read when triton is imported, which torch leaves for later. Kernels then run in its
    # interpreter, on tensors of the CPU.
    os.environ.setdefault("TRITON_INTERPRET", "1")
# Under pytest-xdist the workers share the cores.
_SHARED = "PYTEST_XDIST_WORKER" in os.environ
THREADS = int(os.environ.get("OMP_NUM_THREADS") or (1 if _SHARED else 2))

# No deadline: the first example of a test may compile a kernel. In CI the examples are the same in
# every run, so that a failure there is a failure everywhere.
hypothesis.settings.register_profile("local", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what this machine cannot run, or was not asked to run."""
    no_gpu = pytest.mark.skip(reason="needs a GPU, and torch finds none")
    not_asked = pytest.mark.skip(reason="slow: set RUN_SLOW=1 to run it")
    for item in items:
        if item.get_closest_marker("gpu") and not HAS_GPU:
            item.add_marker(no_gpu)
        if item.get_closest_marker("slow") and os.environ.get("RUN_SLOW", "0") == "0":
            item.add_marker(not_asked)


def pytest_collection_finish() -> None:
    """Take what was imported out of every later garbage collection; transformers asks for many."""
    gc.collect()
    gc.freeze()


def _devices() -> list[object]:
    return ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)] if HAS_GPU else ["cpu"]


@pytest.fixture(params=_devices())
def device(request: pytest.FixtureRequest) -> torch.device:
    """The CPU, and the GPU where there is one (that half then carries the marker gpu)."""
    return torch.device(request.param)


@pytest.fixture(scope="session")
def interpreted() -> None:
    """Kernels compute in the interpreter what they compute on a GPU; does nothing where one is."""
    if os.environ.get("TRITON_INTERPRET", "0") == "1":
        from tests.helpers.interpreter import repair

        repair()


@pytest.fixture
def poisoned_outputs() -> Iterator[None]:
    """What is not written of a tensor made by `empty` is NaN, or the largest integer."""
    before = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.utils.deterministic.fill_uninitialized_memory = before
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session", autouse=True)
def _threads() -> None:
    torch.set_num_threads(THREADS)


@pytest.fixture(autouse=True)
def _seeds() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Output has the width of a pipe: pytest-xdist tells its workers that they have 80 columns."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture(autouse=True)
def _default_dtype() -> Iterator[None]:
    """A test that changes torch's defaults does not change those of the next one."""
    dtype = torch.get_default_dtype()
    yield
    torch.set_default_dtype(dtype)


@pytest.fixture(scope="session")
def demo_model_path() -> Path:
    """The folder of the demo model (SmolLM2-135M-Instruct, bf16), converted on first use."""
    from hf_fp8kv.errors import ConfigError
    from hf_fp8kv.utils import demo_model

    try:
        return demo_model.model_path()
    except ConfigError as error:
        if os.environ.get("CI"):
            raise  # CI installs the model: a skip there would hide half of the tests
        pytest.skip(str(error))
