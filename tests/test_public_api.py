"""What `import hf_fp8kv` gives, and what it does to everything else: almost nothing."""

import inspect
import json
import subprocess
import sys
from types import ModuleType

import pytest
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface

import hf_fp8kv
from hf_fp8kv.attention.switching import watched_attention
from tests.helpers.tiny_models import tiny

HEAVY = ("triton", "numba", "matplotlib")
LATER = ("hf_fp8kv.serving", "transformers.generation.continuous_batching.cache")
REGISTRIES = {"attention": AttentionInterface, "mask": AttentionMaskInterface}


def public_names(module: ModuleType) -> set[str]:
    """What a module holds, without private names and submodules."""
    return {n for n, o in vars(module).items() if n[0] != "_" and not inspect.ismodule(o)}


def test_all_names_exactly_what_can_be_imported():
    assert set(hf_fp8kv.__all__) == public_names(hf_fp8kv)
    assert len(hf_fp8kv.__all__) == len(set(hf_fp8kv.__all__))


def test_all_is_sorted():
    assert hf_fp8kv.__all__ == sorted(hf_fp8kv.__all__)


def test_a_star_import_works():
    names: dict[str, object] = {}
    exec("from hf_fp8kv import *", names)
    assert set(hf_fp8kv.__all__) <= set(names)


PROMISED = [
    "BackendError", "ConfigError", "FP8PagedCache", "Fp8KVError", "KVScales", "OutOfPagesError",
    "ScaleError", "check_model", "disable", "enable",
]  # fmt: skip


@pytest.mark.parametrize("name", PROMISED)
def test_the_names_that_users_write_are_there(name):
    assert name in hf_fp8kv.__all__


@pytest.mark.parametrize("name", sorted(hf_fp8kv.__all__))
def test_every_public_name_says_what_it_is(name):
    assert inspect.getdoc(getattr(hf_fp8kv, name))


def test_private_modules_agree_with_their_all():
    for module in (m for m in vars(hf_fp8kv).values() if inspect.ismodule(m)):
        for name in getattr(module, "__all__", []):
            assert hasattr(module, name), f"{module.__name__}.__all__ names {name}"


# Run in a process of its own: transformers first, then what the import of the package changes.
PROBE = """
import json, sys, warnings
from transformers import AttentionInterface, cache_utils
from transformers.masking_utils import AttentionMaskInterface
import transformers.modeling_utils

def registries():
    return {
        "attention": dict(AttentionInterface._global_mapping),
        "mask": dict(AttentionMaskInterface._global_mapping),
        "attention here": dict(transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS.items()),
        "mask here": dict(transformers.masking_utils.ALL_MASK_ATTENTION_FUNCTIONS.items()),
        "cache": {n: o for n, o in vars(cache_utils).items() if not n.startswith("__")},
    }

before, modules, filters = registries(), set(sys.modules), list(warnings.filters)
import hf_fp8kv
after = registries()
print(json.dumps({
    "added": {k: sorted(after[k].keys() - before[k].keys()) for k in before},
    "changed": {k: [n for n in before[k] if after[k].get(n) is not before[k][n]] for k in before},
    "modules": sorted(set(sys.modules) - modules),
    "filters": len(warnings.filters) - len(filters),
}))
"""


@pytest.fixture(scope="module")
def imported() -> dict[str, object]:
    """What the import changes in a fresh process."""
    command = [sys.executable, "-W", "error::UserWarning", "-c", PROBE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_importing_adds_one_name_to_the_registries(imported):
    assert imported["added"] == {
        "attention": ["fp8_paged"],
        "mask": ["fp8_paged"],
        "attention here": ["fp8_paged"],
        "mask here": ["fp8_paged"],
        "cache": [],
    }


def test_importing_changes_nothing_that_was_there(imported):
    assert not any(imported["changed"].values()), imported["changed"]
    assert imported["filters"] == 0


@pytest.mark.parametrize("module", HEAVY)
def test_importing_does_not_import(imported, module):
    assert module not in {name.split(".")[0] for name in imported["modules"]}


def test_serving_is_imported_when_it_is_asked_for(imported):
    assert not set(LATER) & set(imported["modules"])
    command = "import hf_fp8kv; print(hf_fp8kv.serving.enable.__module__)"
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True)
    assert done.stdout == "hf_fp8kv.serving\n", done.stderr
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        hf_fp8kv.nothing  # noqa: B018


@pytest.mark.parametrize("registry", REGISTRIES.values(), ids=REGISTRIES)
def test_registering_again_changes_nothing(registry):
    before = dict(registry._global_mapping)
    hf_fp8kv.register()
    after = registry._global_mapping
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)


def test_registered_functions_take_the_arguments_of_sdpa_in_its_order():
    """Code that wraps every registered function passes some of them by position."""
    expected = ["module", "query", "key", "value", "attention_mask", "dropout", "scaling"]
    expected += ["is_causal", "position_bias"]
    model, _ = tiny("gqa")
    with watched_attention(model, lambda *_: None):
        ours = {n: f for n, f in AttentionInterface().items() if n.startswith("fp8_paged")}
    assert set(ours) == {"fp8_paged", "fp8_paged_watched"}
    for name, function in {**ours, "sdpa": sdpa_attention_forward}.items():
        assert list(inspect.signature(function).parameters)[:9] == expected, name
