"""The hooks of a build: compiled kernels in the wheel, and a README whose links are absolute."""

import re
import runpy
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

_build_module = runpy.run_path(str(Path(__file__).with_name("build.py")))
_MIN_PYTHON = (3, 11)  # as `requires-python`, which pip compares only after the build


class CompileHook(BuildHookInterface):  # type: ignore[misc]  # hatchling may be missing
    """Adds the compiled CPU kernels to the wheel, if a compiler is found."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile the kernels, and tag the wheel with their platform.

        The tag names no version of glibc, so PyPI accepts the wheel only after `auditwheel repair`.
        """
        if sys.version_info < _MIN_PYTHON:
            required, got = (
                ".".join(map(str, version[:2])) for version in (_MIN_PYTHON, sys.version_info)
            )
            raise SystemExit(f"hf-fp8kv: expected Python {required} or newer, got {got}")
        try:
            _build_module["build"]()
        except (OSError, subprocess.CalledProcessError) as error:
            self.app.display_warning(
                f"CPU kernels were not compiled: {error}. "
                "The slower backend 'torch' is used on CPUs"
            )
            return
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{re.sub('[-.]', '_', sysconfig.get_platform())}"


class ReadmeHook(MetadataHookInterface):  # type: ignore[misc]
    """Makes the links of the README absolute, because PyPI has no files of the repository."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the README of the package, with links to the repository in `[project.urls]`."""
        root = f"{metadata['urls']['Repository']}/blob/main/"
        text = (Path(self.root) / "README.md").read_text("utf-8")
        text = re.sub(r"(!\[[^]]*\]\()(?!https?:)", rf"\1{root.replace('/blob/', '/raw/')}", text)
        text = re.sub(r"(\]\()(?!https?:|#|mailto:)", rf"\1{root}", text)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
