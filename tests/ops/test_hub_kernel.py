"""Tests that the kernel for the Hub is complete, and independent of this package."""

import ast
import os
import subprocess
import sys
from importlib.metadata import version

import pytest

from tests.tools.hub_kernel import BACKENDS, MODULE_NAME, write_kernel

LOAD_SCRIPT = """
import sys
from pathlib import Path
from kernels import get_local_kernel
module = get_local_kernel(Path(sys.argv[1]), backend="cpu")
assert module.attend and module.new_pages
assert not [name for name in sys.modules if name.startswith("hf_fp8kv")]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return the folder of the kernel's repository."""
    path = tmp_path_factory.mktemp("kernel") / "repository"
    write_kernel(path)
    return path


def run_python(folder, *command: str) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = str(folder / "torch-ext")
    process = subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert process.returncode == 0, process.stdout


def test_the_kernel_imports_only_torch_and_triton(folder):
    allowed_packages = {"torch", "triton", *sys.stdlib_module_names}
    for path in (folder / "torch-ext" / MODULE_NAME).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names.append(node.module)
            assert {name.split(".")[0] for name in names} <= allowed_packages, path
    sources = list((folder / "torch-ext" / MODULE_NAME).rglob("*.py"))
    for backend in BACKENDS:
        assert len(list((folder / "build" / f"torch-{backend}").rglob("*.py"))) == len(sources)


@pytest.mark.full
@pytest.mark.skipif(
    version("triton").startswith("3.9."),
    reason="in the interpreter of Triton 3.9 a comparison of scalars cannot mask a block",
)
def test_the_tests_of_the_kernel_pass(folder):
    run_python(folder, "-m", "pytest", "-q", "-k", "1-fp8_e3m4 or 5-int8", "tests")


def test_the_hubs_package_loads_the_kernel(folder):
    pytest.importorskip("kernels", reason="make hub-kernel installs it")
    run_python(folder, "-c", LOAD_SCRIPT, str(folder))
