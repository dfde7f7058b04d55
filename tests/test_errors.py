"""Tests of the error classes: their built-in bases, copies and pickles."""

import copy
import inspect
import pickle

import pytest

from hf_fp8kv import errors
from hf_fp8kv.errors import (
    BackendError,
    ConfigError,
    EngineError,
    FP8KVError,
    OutOfPagesError,
    ScaleError,
)

# The built-in base of each error class. FP8KVError extends only Exception.
BUILT_IN_BASES = {
    FP8KVError: Exception,
    ConfigError: ValueError,
    ScaleError: ValueError,
    OutOfPagesError: MemoryError,
    BackendError: RuntimeError,
    EngineError: RuntimeError,
}


def test_each_error_has_one_built_in_base():
    assert {cls for _, cls in inspect.getmembers(errors, inspect.isclass)} == set(BUILT_IN_BASES)
    for cls, built_in_base in BUILT_IN_BASES.items():
        exception_bases = {base for base in cls.__mro__ if issubclass(base, Exception)}
        assert exception_bases == {cls, FP8KVError, built_in_base, Exception}


@pytest.mark.parametrize("error_class", BUILT_IN_BASES, ids=lambda cls: cls.__name__)
def test_errors_can_be_copied_and_pickled(error_class):
    page_counts = {"needed": 7, "available": 2} if error_class is OutOfPagesError else {}
    error = error_class("a message", **page_counts)
    duplicates = [copy.copy(error), copy.deepcopy(error)]
    duplicates += [
        pickle.loads(pickle.dumps(error, protocol))
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1)
    ]
    for duplicate in duplicates:
        assert type(duplicate) is error_class
        assert (str(duplicate), duplicate.args) == ("a message", error.args)
        assert vars(duplicate) == vars(error) == page_counts
