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

from hf_fp8kv.server import sampling

SERVER_FOLDER = Path(inspect.getfile(sampling)).parent
# Private names of transformers that are assigned or called.
PRIVATE_NAMES = {
    model_runner.ModelRunner: {"_sample"},
    scheduler.FIFOScheduler: {"_process_candidates", "_schedule_request"},
}
PUBLIC_NAMES = {
    continuous_api.ContinuousBatchingManager: {
        "start", "stop", "is_running", "add_request", "cancel_request", "register_result_handler",
    },
    continuous_api.OutputRouter: {"fail_and_deliver", "deliver"},
    input_outputs.ContinuousBatchingIOs: {"prepare_batch_update", "carry_over_tokens"},
    requests.RequestState: {"to_generation_output", "status"},
    scheduler.FIFOScheduler: {"finish_request"},
}  # fmt: skip


@pytest.mark.parametrize("names", [PRIVATE_NAMES, PUBLIC_NAMES], ids=["private", "public"])
def test_the_engine_has_the_used_names(names):
    missing = {
        f"{owner.__name__}.{name}"
        for owner in names
        for name in names[owner]
        if not hasattr(owner, name)
    }
    assert not missing, f"transformers has no {missing}: change hf_fp8kv/server/engine.py"


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
    assert used_names - own_names - {"_exit"} == set().union(*PRIVATE_NAMES.values())


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
