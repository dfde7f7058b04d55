"""Tests of the public names, and of the effects of the import on transformers and the process."""

import inspect
import json
import subprocess
import sys
from types import ModuleType

import pytest

import hf_fp8kv


def find_public_names(module: ModuleType) -> set[str]:
    """Return the names in a module, except private names and submodules."""
    return {
        name
        for name, member in vars(module).items()
        if name[0] != "_" and not inspect.ismodule(member)
    }


STABLE_NAMES = {
    "BackendError", "ConfigError", "FP8KVError", "FP8PagedCache", "KVScales", "OutOfPagesError",
    "ScaleError", "check_model", "demo_model_path", "disable", "enable", "make_application",
}  # fmt: skip


def test_all_lists_exactly_the_public_names_in_order():
    namespace: dict[str, object] = {}
    exec("from hf_fp8kv import *", namespace)
    public_names = find_public_names(hf_fp8kv) | {"make_application"}
    assert set(hf_fp8kv.__all__) == public_names <= namespace.keys()
    assert hf_fp8kv.__all__ == sorted(set(hf_fp8kv.__all__))
    assert set(hf_fp8kv.__all__) >= STABLE_NAMES
    assert all(inspect.getdoc(getattr(hf_fp8kv, name)) for name in hf_fp8kv.__all__)


# This script runs in a new process. It imports transformers and then the package, and prints the
# changes that the second import makes.
IMPORT_SCRIPT = """
import json, sys, warnings
from transformers import AttentionInterface, cache_utils
from transformers.masking_utils import AttentionMaskInterface
import transformers.modeling_utils
from transformers import DynamicCache, GenerationMixin, PreTrainedModel

def read_registries():
    return {
        "attention": dict(AttentionInterface._global_mapping),
        "mask": dict(AttentionMaskInterface._global_mapping),
        "imported attention": dict(transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS.items()),
        "imported mask": dict(transformers.masking_utils.ALL_MASK_ATTENTION_FUNCTIONS.items()),
        "cache": {
            name: member for name, member in vars(cache_utils).items() if not name.startswith("__")
        },
    }

old_registries = read_registries()
old_modules = set(sys.modules)
num_filters = len(warnings.filters)
import hf_fp8kv
added, changed = {}, {}
for kind, new in read_registries().items():
    old = old_registries[kind]
    added[kind] = sorted(new.keys() - old.keys())
    changed[kind] = [name for name in old if new.get(name) is not old[name]]
print(json.dumps({
    "added": added,
    "changed": changed,
    "modules": sorted(set(sys.modules) - old_modules),
    "filters": len(warnings.filters) - num_filters,
    "lazy": [hf_fp8kv.serving.enable.__module__, hf_fp8kv.make_application.__module__],
}))
"""


def test_importing_adds_one_name_to_the_registries_and_loads_no_other_package():
    command = [sys.executable, "-W", "error::UserWarning", "-c", IMPORT_SCRIPT]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    changes = json.loads(process.stdout)
    registries = ("attention", "mask", "imported attention", "imported mask")
    assert changes["added"] == {**{name: ["fp8_paged"] for name in registries}, "cache": []}
    assert not any(changes["changed"].values()), changes["changed"]
    assert changes["filters"] == 0
    other_modules = {name for name in changes["modules"] if name.split(".")[0] != "hf_fp8kv"}
    # Otherwise the first `np.unique` imports numpy.ma. A cache that is deleted during that import
    # is measured, which would call `np.unique` and import numpy.ma again, without end.
    assert "numpy.ma" in other_modules
    assert all(name.startswith("numpy.ma") for name in other_modules), other_modules
    assert "hf_fp8kv.serving" not in changes["modules"]
    assert changes["lazy"] == ["hf_fp8kv.serving", "hf_fp8kv.server"]
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        hf_fp8kv.nothing  # noqa: B018
