"""Write the Triton kernels as a Hub kernel, in the layout of Hugging Face's package `kernels`.

    python -m tests.tools.hub_kernel build/kernel

The kernel consists of `hf_fp8kv/ops/triton` and the modules that it imports, which need only torch
and Triton. The written repository is never committed. It has the source for kernel-builder in
`torch-ext/`, and in `build/` the files that kernel-builder would produce, for
`kernels.get_local_kernel`.
"""

import argparse
import ast
import json
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "hf_fp8kv"
MODULE_NAME, HUB_NAME = "fp8_paged_attention", "fp8-paged-attention"
VERSION = 1
# Triton needs no build step. "cpu" is for Triton's interpreter.
BACKENDS = ("cuda", "rocm", "cpu")
BACKEND_FILE = "ops/triton/backend.py"
# Folder of the files that do not come from the package: public names, tests and card.
EXTRA_FOLDER = ROOT / "tests" / "data" / "hub_kernel"


def find_sources(first_file: str = BACKEND_FILE) -> list[str]:
    """Return a file of the package, and all files that its relative imports load.

    Files without code replace the initialization of the package and of `ops`, which import too
    much.
    """
    sources = {first_file}
    queue = [first_file]
    while queue:
        path = queue.pop()
        for node in ast.walk(ast.parse((PACKAGE / path).read_text())):
            if isinstance(node, ast.ImportFrom) and node.level:
                module = Path(*Path(path).parts[: -node.level], *(node.module or "").split("."))
                modules = [module, *(module / alias.name for alias in node.names)]
                files = {f"{x}{end}" for x in modules for end in (".py", "/__init__.py")}
                files -= {*sources, "./__init__.py", "ops/__init__.py"}
                queue += [file for file in sorted(files) if (PACKAGE / file).is_file()]
                sources.update(queue)
    return sorted(sources)


def write_kernel(folder: Path) -> None:
    """Replace the contents of a folder with the kernel's repository."""
    shutil.rmtree(folder, ignore_errors=True)
    source_folder = folder / "torch-ext" / MODULE_NAME
    for path in find_sources():
        (source_folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(PACKAGE / path, source_folder / path)
    (source_folder / "ops" / "__init__.py").write_text('"""Operations on stored pages."""\n')
    shutil.copy(EXTRA_FOLDER / "init.py", source_folder / "__init__.py")
    (folder / "tests").mkdir()
    shutil.copy(EXTRA_FOLDER / "own_tests.py", folder / "tests/test_kernel.py")
    shutil.copy(ROOT / "LICENSE", folder)
    card = (EXTRA_FOLDER / "CARD.md").read_text()
    for field, value in (("title", HUB_NAME), ("version", VERSION), ("commit", read_commit())):
        card = card.replace(f"{{{field}}}", str(value))
    (folder / "CARD.md").write_text(card)
    (folder / "build.toml").write_text(
        f'[general]\nname = "{HUB_NAME}"\nversion = {VERSION}\nedition = 5\n'
        f'license = "Apache-2.0"\nbackends = {json.dumps(BACKENDS[:2])}\n\n'
        f'[general.hub]\nrepo-id = "<owner>/{HUB_NAME}"\n\n[torch-noarch]\n'
    )
    for backend in BACKENDS:
        build_folder = folder / "build" / f"torch-{backend}"
        shutil.copytree(source_folder, build_folder)
        metadata = {
            "name": HUB_NAME, "id": f"{MODULE_NAME}_{backend}_{VERSION}", "version": VERSION,
            "license": "Apache-2.0", "python-depends": [], "backend": {"type": backend},
        }  # fmt: skip
        (build_folder / "metadata.json").write_text(json.dumps(metadata, indent=2))


def read_commit() -> str:
    command = ["git", "--git-dir", str(ROOT / ".git"), "rev-parse", "--short", "HEAD"]
    process = subprocess.run(command, capture_output=True, text=True)
    return process.stdout.strip() or "(no commit)"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="folder to which the kernel is written")
    write_kernel(parser.parse_args().folder)
