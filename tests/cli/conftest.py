"""Fixtures of a tiny model, and of commands that run in this process."""

import json
from typing import Any

import pytest

from tests.helpers import command_line


class Command:
    """Runs commands in this process, and checks their exit codes."""

    def __init__(self, run_command: command_line.Runner) -> None:
        self.run_command = run_command

    def __call__(self, *arguments: object, stdin: str = "") -> tuple[str, str]:
        """Run a command that must succeed. Return its stdout and stderr."""
        code, output, stderr = self.run_command(*map(str, arguments), stdin=stdin)
        assert code == 0, stderr
        return output, stderr

    def json(self, *arguments: object, **kwargs: str) -> Any:
        return json.loads(self(*arguments, "--json", **kwargs)[0])

    def fails(self, *arguments: object, code: int = 1, stdin: str = "") -> str:
        """Run a command that must exit with `code`, without output on stdout. Return its stderr."""
        exit_code, output, stderr = self.run_command(*map(str, arguments), stdin=stdin)
        assert (exit_code, output) == (code, ""), stderr
        assert "Traceback" not in stderr
        return stderr


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory) -> str:
    return command_line.save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def run(monkeypatch, capsys) -> Command:
    monkeypatch.setenv("COLUMNS", "200")
    return Command(command_line.make_runner(monkeypatch, capsys))
