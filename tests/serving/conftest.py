"""Fixtures of tests of the server."""

import pytest

from tests.helpers.serve_process import save_chat_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_chat_model(tmp_path_factory.mktemp("chat"))
