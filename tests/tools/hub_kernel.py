"""The Triton kernels as a kernel for the Hub, in the layout of Hugging Face's package `kernels`.

    python -m tests.tools.hub_kernel build/kernel

It is made from `hf_fp8kv/ops/triton` and what that imports, which is torch and Triton alone, and
never committed: source in `torch-ext/`, which kernel-builder reads, and what that makes of it in
`build/`, which `kernels.get_local_kernel` loads.
"""

import ast
import json
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "hf_fp8kv"
NAME, TITLE = "fp8_paged_attention", "fp8-paged-attention"
VERSION = 1
# For Triton there is nothing to compile; "cpu" is for its interpreter.
BACKENDS = ("cuda", "rocm", "cpu")
_FIRST = "ops/triton/backend.py"

# What is written by hand: its names, tests, benchmark and card.
PARTS = ROOT / "tests" / "data" / "hub_kernel"


def find_sources(first: str = _FIRST) -> list[str]:
    """Return the files that a file of the package imports, and itself, by relative imports."""
    found: dict[str, None] = {}
    left = [first]
    while left:
        path = left.pop()
        if path in found:
            continue
        found[path] = None
        here = Path(path).parent.parts
        for node in ast.walk(ast.parse((PACKAGE / path).read_text())):
            if not isinstance(node, ast.ImportFrom) or not node.level:
                continue
            base = here[: len(here) - node.level + 1]
            target = Path(*base, *(node.module or "").split("."))
            names = [target, *(target / alias.name for alias in node.names)]
            for name in names:
                for file in (name.with_suffix(".py"), name / "__init__.py"):
                    if (PACKAGE / file).is_file() and not _is_bare(file):
                        left.append(file.as_posix())
    return sorted(found)


def _is_bare(file: Path) -> bool:
    """Return whether a file is replaced by an empty one: it imports much that is not needed."""
    return file.as_posix() in ("__init__.py", "ops/__init__.py")


def make_kernel(target: Path) -> None:
    """Write the kernel's repository to a folder, which is emptied before."""
    shutil.rmtree(target, ignore_errors=True)
    source = target / "torch-ext" / NAME
    for path in find_sources():
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(PACKAGE / path, source / path)
    (source / "ops" / "__init__.py").write_text('"""Operations on stored pages."""\n')
    shutil.copy(PARTS / "init.py", source / "__init__.py")
    for folder, part, name in (
        ("tests", "own_tests.py", "test_kernel.py"),
        ("benchmarks", "benchmark.py", "benchmark.py"),
    ):
        (target / folder).mkdir()
        shutil.copy(PARTS / part, target / folder / name)
    shutil.copy(ROOT / "LICENSE", target)
    card = (PARTS / "CARD.md").read_text()
    for field, value in (("title", TITLE), ("version", VERSION), ("commit", _commit())):
        card = card.replace(f"{{{field}}}", str(value))
    (target / "CARD.md").write_text(card)
    (target / "build.toml").write_text(
        f'[general]\nname = "{TITLE}"\nversion = {VERSION}\nedition = 5\nlicense = "Apache-2.0"\n'
        f"backends = {json.dumps(BACKENDS[:2])}\n\n[general.hub]\n"
        f'repo-id = "<owner>/{TITLE}"\n\n[torch-noarch]\n'
    )
    for backend in BACKENDS:
        built = target / "build" / f"torch-{backend}"
        shutil.copytree(source, built)
        metadata = {
            "name": TITLE, "id": f"{NAME}_{backend}_{VERSION}", "version": VERSION,
            "license": "Apache-2.0", "python-depends": [], "backend": {"type": backend},
        }  # fmt: skip
        (built / "metadata.json").write_text(json.dumps(metadata, indent=2))


def _commit() -> str:
    head = ROOT / ".git"
    if not head.exists():
        return "(no commit)"
    import subprocess

    asked = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    return subprocess.run(asked, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    make_kernel(Path(sys.argv[1]))
