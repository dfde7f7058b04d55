"""A tiny model, scales next to it, and the command line in this process."""

import pytest

from tests.helpers import command_line


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> str:
    return command_line.save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def run(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    return command_line.runner(monkeypatch, capsys)
