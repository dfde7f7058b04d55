"""Tests of the build's hooks: Python's version, the tag of the wheel, and the README's links."""

import re
import sys
import tomllib
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from hf_fp8kv.ops.cpu import build

ROOT = Path(__file__).parents[2]


@pytest.fixture
def hook(monkeypatch) -> SimpleNamespace:
    """Return the names that the hook's file defines. Stubs replace hatchling in this process."""
    interfaces = {
        "hatchling.builders.hooks.plugin.interface": "BuildHookInterface",
        "hatchling.metadata.plugin.interface": "MetadataHookInterface",
    }
    for module_name, class_name in interfaces.items():
        module = ModuleType(module_name)
        setattr(module, class_name, type(class_name, (), {}))
        monkeypatch.setitem(sys.modules, module_name, module)
        package_name = module_name
        while package_name := package_name.rpartition(".")[0]:
            monkeypatch.setitem(sys.modules, package_name, ModuleType(package_name))
    path = Path(build.__file__).with_name("hook.py")
    namespace: dict[str, Any] = {"__name__": "hook", "__file__": str(path)}
    exec(compile(path.read_text(), str(path), "exec"), namespace)
    return SimpleNamespace(namespace=namespace, **namespace)


def test_an_old_python_is_refused_before_anything_compiles(hook, monkeypatch):
    calls: list[str] = []
    monkeypatch.setitem(hook._build_module, "build", lambda: calls.append("build"))
    build_data: dict[str, Any] = {}
    hook.CompileHook().initialize("standard", build_data)
    assert calls == ["build"]
    assert re.fullmatch(r"py3-none-(linux|macosx|win)\w+", build_data["tag"])
    monkeypatch.setattr(sys, "version_info", (3, 10, 13))
    with pytest.raises(SystemExit, match=r"expected Python 3\.11 or newer, got 3\.10"):
        hook.CompileHook().initialize("standard", {})
    assert calls == ["build"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == ">=" + ".".join(map(str, hook._MIN_PYTHON))


def test_a_missing_compiler_leaves_a_wheel_for_every_platform(hook, monkeypatch):
    def fail() -> None:
        raise OSError("no compiler")

    monkeypatch.setitem(hook._build_module, "build", fail)
    warnings: list[str] = []
    compile_hook = hook.CompileHook()
    build_data: dict[str, Any] = {}
    compile_hook.app = SimpleNamespace(display_warning=warnings.append)
    compile_hook.initialize("standard", build_data)
    assert build_data == {}
    assert "CPU kernels were not compiled: no compiler" in warnings[0]


def test_the_links_of_the_package_are_absolute(hook):
    metadata = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    readme_hook = hook.ReadmeHook()
    readme_hook.root = str(ROOT)
    readme_hook.update(metadata)
    repository = metadata["urls"]["Repository"]
    links = re.findall(r"\]\(([^)]*)\)", metadata["readme"]["text"])
    assert len(links) > 5
    assert all(link.startswith(("https://", "#")) for link in links)
    for link in links:
        if link.startswith(f"{repository}/"):
            view, path = link.removeprefix(f"{repository}/").split("/main/")
            assert (ROOT / path.partition("#")[0]).exists(), link
            assert (view == "raw") == path.endswith(".png"), link
