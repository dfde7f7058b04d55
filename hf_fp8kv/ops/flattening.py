"""Records as flat arguments and back, for torch.library and tensor subclasses.

Names, order and schemas follow from the fields of the records in pages.py.
"""

import types
import typing
from collections.abc import Iterator
from itertools import islice
from typing import Annotated, Any, TypeAlias, TypeVar

import torch

from .pages import WRITTEN, Pages

Leaf: TypeAlias = torch.Tensor | str | int | float | bool | None
_Record = TypeVar("_Record")


def _fields(record: Any) -> dict[str, Any]:
    """Return the types of a NamedTuple's fields by name."""
    return typing.get_type_hints(record, include_extras=True)


def _is_record(kind: Any) -> bool:
    return hasattr(kind, "_fields")


def _leaves(record: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield name and type of each field that is no record: `k_codes` for `codes` of `k`."""
    for name, kind in _fields(record).items():
        if _is_record(kind):
            yield from _leaves(kind, f"{prefix}{name}_")
        else:
            yield prefix + name, kind


# What `flatten` gives, by name.
PAGE_FIELDS = tuple(name for name, _ in _leaves(Pages))
# The records among the fields of a record, each in its place.
_NESTED = {Pages: tuple(kind if _is_record(kind) else None for kind in _fields(Pages).values())}


def flatten(pages: Pages) -> tuple[Leaf, ...]:
    """Return the fields of `pages.k`, then those of `pages.v`, then the others."""
    return (*pages.k, *pages.v, *pages[2:])


def unflatten(record: type[_Record], leaves: Iterator[Any]) -> _Record:
    """Return a record (`Pages`, or one without records in it) of the next of `leaves`."""
    make: Any = record
    nested = _NESTED.get(make)
    if nested is None:
        made: _Record = make(*islice(leaves, len(make._fields)))
    else:
        made = make(*[next(leaves) if kind is None else unflatten(kind, leaves) for kind in nested])
    return made


_TYPES = {torch.Tensor: "Tensor", str: "str", int: "int", float: "float", bool: "bool"}


def schema_of(record: Any, *, written: bool = False) -> str:
    """Return the fields of a record as arguments in a schema of torch.library.

    Args:
        record: a NamedTuple, of leaves or records.
        written: whether the operation writes the tensors marked so.
    """
    return ", ".join(
        f"{_schema_type(kind, i if written else None)} {name}"
        for i, (name, kind) in enumerate(_leaves(record))
    )


def _schema_type(kind: Any, alias: int | None) -> str:
    is_written = False
    if typing.get_origin(kind) is Annotated:
        kind, *marks = typing.get_args(kind)
        is_written = WRITTEN in marks
    optional = ""
    if isinstance(kind, types.UnionType):
        kind, _none = typing.get_args(kind)
        optional = "?"
    mark = f"(a{alias}!)" if is_written and alias is not None else ""
    return f"{_TYPES[kind]}{mark}{optional}"
