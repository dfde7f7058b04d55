"""The build hook that compiles the kernels when a wheel is built or the package is installed."""

import runpy
import subprocess
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from packaging.tags import sys_tags

_build_module = runpy.run_path(str(Path(__file__).with_name("build.py")))


class CompileHook(BuildHookInterface):  # type: ignore[misc]  # hatchling may be missing
    """Adds the libraries to the wheel. Without a compiler, the wheel has no libraries."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile the kernels, and tag the wheel with their platform."""
        try:
            _build_module["build"]()
        except (OSError, subprocess.CalledProcessError) as error:
            consequence = "The slower backend 'torch' is used on CPUs"
            self.app.display_warning(f"CPU kernels were not compiled: {error}. {consequence}")
            return
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{next(sys_tags()).platform}"
