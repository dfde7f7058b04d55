"""Tests of the structure: imports between folders, budgets of statements, and texts of mutants."""

import ast
import functools
import importlib.util
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tools.mutants import MUTANTS

PACKAGE = Path(__file__).parents[1] / "hf_fp8kv"
# The command line is a separate package, because an import of `hf_fp8kv` takes seconds.
CLI = PACKAGE.with_name("hf_fp8kv_cli")
# Folders from the bottom to the top. A folder only imports from folders on lower floors. Imports in
# functions and for types count.
FLOORS = (
    ("errors",),
    ("formats", "utils"),
    ("modeling", "ops", "scales"),
    ("paging",),
    ("cache",),
    ("attention", "prefix"),
    ("calibration", "reproducible"),
    ("enabling", "serving"),
    ("server",),
    ("__init__", "vllm"),
    ("card",),
    ("cli",),
)

# Maximum number of Python statements of each folder of the package. The files next to the folders
# count as "__init__" and "errors". Only an issue may raise a budget.
BUDGETS = {
    "__init__": 31, "attention": 1354, "cache": 2033, "calibration": 977, "card": 562, "cli": 705,
    "enabling": 249, "errors": 23, "formats": 198, "modeling": 479, "ops": 3010, "paging": 1100,
    "prefix": 1075, "reproducible": 347, "scales": 1621, "server": 2490, "serving": 1191,
    "utils": 448, "vllm": 519,
}  # fmt: skip


def get_module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


PATHS = sorted(path for folder in (PACKAGE, CLI) for path in folder.rglob("*.py"))
MODULES = {get_module_name(path): path for path in PATHS}


@functools.cache
def list_nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text())))


def find_imports(name: str) -> Iterator[str]:
    """Yield the modules of the package that a module imports, at any place in the file."""
    path = MODULES[name]
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in list_nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in MODULES)
        elif isinstance(node, ast.ImportFrom):
            source = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            for alias in node.names:
                member = f"{source}.{alias.name}"
                if member in MODULES or source in MODULES:
                    yield member if member in MODULES else source


@functools.cache
def build_import_graph() -> dict[str, set[str]]:
    return {name: set(find_imports(name)) - {name} for name in MODULES}


def get_folder(module: str) -> str:
    if module.split(".")[0] == CLI.name:
        return "cli"
    return module.split(".")[1] if "." in module else "__init__"


def find_cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the groups of modules that import each other, directly or through other modules."""
    reachable = {name: set(targets) for name, targets in graph.items()}
    for module in graph:
        for targets in reachable.values():
            if module in targets:
                targets |= reachable[module]
    groups = {
        frozenset(target for target in reachable[name] if name in reachable[target])
        for name in graph
        if name in reachable[name]
    }
    return sorted(sorted(group) for group in groups)


def test_the_package_has_no_import_cycles():
    cycles = find_cycles(build_import_graph())
    print(f"{len(cycles)} import cycles among {len(MODULES)} modules")
    assert not cycles, "\n".join(" <-> ".join(cycle) for cycle in cycles)


def test_imports_point_to_lower_floors():
    floors = {folder: index for index, folders in enumerate(FLOORS) for folder in folders}
    assert {get_folder(module) for module in MODULES} == set(floors)
    wrong_imports = []
    for module, targets in build_import_graph().items():
        folder = get_folder(module)
        for target_folder in {get_folder(target) for target in targets} - {folder}:
            if floors[target_folder] >= floors[folder]:
                wrong_imports.append(f"{module} imports from {target_folder}")
    print(f"{len(wrong_imports)} imports against the order")
    assert not wrong_imports, "\n".join(wrong_imports)


def test_docs_list_the_same_floors():
    text = (PACKAGE.parent / "docs" / "architecture.md").read_text()
    table = re.findall(r"^\| (\d+) \| `(\w+)` \|", text, re.MULTILINE)
    assert table == [(str(n), folder) for n, folders in enumerate(FLOORS, 1) for folder in folders]


def test_each_mutant_can_be_applied():
    stale_names = [
        mutant.name
        for mutant in MUTANTS
        if (PACKAGE / mutant.file).read_text().count(mutant.old) != 1
    ]
    assert not stale_names
    test_paths = {PACKAGE.parent / path for mutant in MUTANTS for path in mutant.tests.split()}
    assert not [path for path in test_paths if not path.exists()]


@pytest.mark.style
def test_no_folder_exceeds_its_budget():
    num_statements = Counter[str]()
    for name, path in MODULES.items():
        num_statements[get_folder(name)] += sum(
            isinstance(node, ast.stmt) for node in list_nodes(path)
        )
    root_files = [path.name for path in PACKAGE.glob("*.py")]
    print(f"{len(MODULES)} files, {num_statements.total()} statements: {dict(num_statements)}")
    excess = {
        folder: (count, BUDGETS[folder])
        for folder, count in num_statements.items()
        if count > BUDGETS[folder]
    }
    assert not excess, f"statements and budget of a folder: {excess}. Delete some first"
    assert BUDGETS.keys() == num_statements.keys()
    assert len(root_files) <= 6, root_files
