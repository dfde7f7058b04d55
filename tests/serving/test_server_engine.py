"""Tests that transformers' engine has the names that the server uses."""

import ast
import inspect
import re
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="needs the extra serve")
from transformers.generation.continuous_batching import (
    continuous_api,
    input_outputs,
    model_runner,
    requests,
    scheduler,
)
from transformers.generation.continuous_batching.cb_logits_processors import (
    ContinuousBatchingLogitsProcessorList,
)

from hf_fp8kv.server import engine, sampling

SERVER_FOLDER = Path(inspect.getfile(sampling)).parent
# Attributes of transformers' objects that the server replaces. It must not replace a fifth.
REPLACED_NAMES = {
    continuous_api.ContinuousBatchingManager: {"logit_processor"},
    model_runner.ModelRunner: {"_sample"},
    input_outputs.ContinuousBatchingIOs: {"prepare_batch_update", "carry_over_tokens"},
}
PUBLIC_NAMES = {
    continuous_api.ContinuousBatchingManager: {
        "start", "stop", "is_running", "pause", "add_request", "cancel_request",
        "register_result_handler",
    },
    continuous_api.OutputRouter: {"fail_and_deliver", "deliver"},
    requests.RequestState: {"to_generation_output", "status"},
    scheduler.FIFOScheduler: {"finish_request"},
}  # fmt: skip
# Attributes of this package's objects, and state that transformers' own engine also changes.
ASSIGNED_NAMES = {
    "on_processor", "on_prefix_match", "submitted_at", "num_cached_tokens", "error", "status",
    "block_new_requests",
}  # fmt: skip


def test_the_engine_has_the_used_names():
    model_attributes = {"logit_processor"}  # set by ContinuousBatchingManager.__init__
    missing = {
        f"{owner.__name__}.{name}"
        for owners in (REPLACED_NAMES, PUBLIC_NAMES)
        for owner, names in owners.items()
        for name in names - model_attributes
        if not hasattr(owner, name)
    }
    assert not missing, f"transformers has no {missing}: change hf_fp8kv/server/engine.py"


def test_four_attributes_of_the_engine_are_replaced():
    """The module's docstring lists them."""
    replaced_names = set().union(*REPLACED_NAMES.values())
    assert len(replaced_names) == 4
    assigned_names = {
        target.attr
        for node in ast.walk(ast.parse(inspect.getsource(engine)))
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Attribute) and ast.unparse(target.value) != "self"
    }
    assert assigned_names == replaced_names | ASSIGNED_NAMES
    for name in replaced_names:
        assert re.search(rf"`(\w+\.)?{name}`", str(engine.__doc__)), name


def test_no_other_module_touches_the_engine():
    for path in SERVER_FOLDER.glob("*.py"):
        text = path.read_text()
        assert not re.search(r"\bsetattr\(|register_\w*hook", text), path
        if path.name != "engine.py":
            assert "continuous_batching" not in text.replace("init_continuous_batching", ""), path


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


def test_the_sampler_has_the_methods_of_the_engines_processors():
    """The sampler replaces the engine's list of processors. The engine never calls `clear`."""
    stock_signatures = {
        name: inspect.signature(method)
        for name, method in inspect.getmembers(ContinuousBatchingLogitsProcessorList, callable)
        if not name.startswith("_") and name != "clear"
    }
    assert stock_signatures
    for name, signature in stock_signatures.items():
        own_signature = inspect.signature(getattr(sampling.Sampler, name))
        assert len(own_signature.parameters) == len(signature.parameters), name
    call = inspect.signature(ContinuousBatchingLogitsProcessorList.__call__)
    assert len(inspect.signature(sampling.Sampler.__call__).parameters) == len(call.parameters)
    assert {"do_processing", "tensors_required"} <= vars(sampling.Sampler).keys()
