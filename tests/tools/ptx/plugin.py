"""A pytest plugin that runs the kernels of tests from their PTX: `make kernels-ptx`.

`python -m pytest -p tests.tools.ptx.plugin tests/ops` uses the device of device.py.
"""

import os
from collections.abc import Iterator

import pytest

# conftest.py and Triton read this variable when they are imported.
os.environ["TRITON_INTERPRET"] = "0"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--target", default="sm_90", help="GPU for which kernels are compiled")


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    from hf_fp8kv.ops import backends

    backends._explain_triton_unavailability = lambda: None
    backends._explain_unsupported_device = lambda *_: None


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop(session: pytest.Session) -> Iterator[None]:
    """Run the tests as on a GPU with four SMs, so that grids are small."""
    from hf_fp8kv.ops.triton import replay
    from hf_fp8kv.ops.triton.target import Target, assuming

    from . import device

    # Recordings are off, because only direct launches pass tensors, whose bounds are checked.
    replay._CAN_REPLAY = False
    device.activate()
    arch = int(session.config.getoption("--target").removeprefix("sm_"))
    with assuming(Target("cuda", arch, 4)):
        return (yield)
