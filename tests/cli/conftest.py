"""A tiny model, scales next to it, and the command line in this process."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import command_line
from tests.scales.test_export import random_scales


class Command:
    """Runs the command line in this process. An error writes nothing to stdout."""

    def __init__(self, call: command_line.Runner) -> None:
        self.call = call

    def __call__(self, *arguments: object, stdin: str = "") -> tuple[str, str]:
        """Run a command that must succeed, and return its stdout and stderr."""
        code, out, err = self.call(*map(str, arguments), stdin=stdin)
        assert code == 0, err
        return out, err

    def json(self, *arguments: object, **more: str) -> Any:
        """Run a command that must succeed with `--json`, and return its output."""
        return json.loads(self(*arguments, "--json", **more)[0])

    def fails(self, *arguments: object, code: int = 1) -> str:
        """Run a command that must exit with `code`, and return its stderr."""
        found, out, err = self.call(*map(str, arguments))
        assert (found, out) == (code, ""), err
        assert "Traceback" not in err
        return err


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> str:
    return command_line.save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def run(monkeypatch, capsys) -> Command:
    monkeypatch.setenv("COLUMNS", "200")
    return Command(command_line.runner(monkeypatch, capsys))


@pytest.fixture
def own(tmp_path) -> Path:
    """A folder with scales of three layers."""
    random_scales("tensor").save_pretrained(tmp_path / "own")
    return tmp_path / "own"
