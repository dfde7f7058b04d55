"""Tests that the server touches few private parts of transformers' engine."""

import ast
import inspect
import re
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="needs the extra serve")

from hf_fp8kv.server import engine

SERVER_FOLDER = Path(inspect.getfile(engine)).parent
# Attributes of transformers' objects that the server replaces. It must not replace a fifth.
REPLACED_NAMES = {"logit_processor", "_sample", "prepare_batch_update", "carry_over_tokens"}
# Attributes of this package's objects, and state that transformers' own engine also changes.
ASSIGNED_NAMES = {
    "on_processor", "on_prefix_match", "submitted_at", "num_cached_tokens", "error", "status",
    "block_new_requests",
}  # fmt: skip


def test_four_attributes_of_the_engine_are_replaced():
    """The module's docstring lists them."""
    assigned_names = {
        target.attr
        for node in ast.walk(ast.parse(inspect.getsource(engine)))
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Attribute) and ast.unparse(target.value) != "self"
    }
    assert assigned_names == REPLACED_NAMES | ASSIGNED_NAMES
    for name in REPLACED_NAMES:
        assert re.search(rf"`(\w+\.)?{name}`", str(engine.__doc__)), name


def test_no_other_private_names_are_used():
    """A foreign private attribute begins with an underscore, and the server does not define it."""
    text = "\n".join(path.read_text() for path in SERVER_FOLDER.glob("*.py"))
    own_names = set(re.findall(r"\bself\.(_\w+)", text)) | set(re.findall(r"\bdef (_\w+)", text))
    used_names = {
        node.attr
        for path in SERVER_FOLDER.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and re.match(r"_[a-z]", node.attr)
    }
    # `os._exit` is public.
    assert used_names - own_names - {"_exit"} == {"_sample"}
