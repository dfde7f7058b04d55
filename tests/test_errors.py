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

# The built-in base class of each error. Code that catches the built-in class catches the error.
BUILT_IN_BASES = {
    ConfigError: ValueError,
    ScaleError: ValueError,
    OutOfPagesError: MemoryError,
    BackendError: RuntimeError,
    EngineError: RuntimeError,
}
EXAMPLES = [
    FP8KVError("something"),
    ConfigError("a config"),
    ScaleError("a scale"),
    OutOfPagesError("no pages", needed=7, available=2),
    BackendError("no backend"),
    EngineError("it ended"),
]


def test_examples_cover_all_errors_of_the_module():
    classes = {cls for _, cls in inspect.getmembers(errors, inspect.isclass)}
    assert classes == {FP8KVError, *BUILT_IN_BASES} == {type(error) for error in EXAMPLES}


@pytest.mark.parametrize("error_class", BUILT_IN_BASES, ids=lambda cls: cls.__name__)
def test_each_error_has_one_built_in_base(error_class):
    assert issubclass(error_class, FP8KVError)
    assert issubclass(error_class, BUILT_IN_BASES[error_class])
    assert [base for base in BUILT_IN_BASES if issubclass(error_class, base)] == [error_class]
    assert FP8KVError.__bases__ == (Exception,)


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_errors_can_be_copied_and_pickled(error):
    assert_equal_copy(error, copy.copy(error))
    assert_equal_copy(error, copy.deepcopy(error))
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert_equal_copy(error, pickle.loads(pickle.dumps(error, protocol)))


def assert_equal_copy(error: FP8KVError, duplicate: FP8KVError) -> None:
    assert type(duplicate) is type(error)
    assert duplicate is not error
    assert (str(duplicate), duplicate.args) == (str(error), error.args)
    assert vars(duplicate) == vars(error)


def test_out_of_pages_error_requires_both_counts():
    error = OutOfPagesError("no pages", needed=7, available=2)
    assert (error.needed, error.available, str(error)) == (7, 2, "no pages")
    for counts in ({}, {"needed": 1}, {"available": 1}):
        with pytest.raises(TypeError, match="keyword-only"):
            OutOfPagesError("no pages", **counts)
