"""Records as flat arguments and back, for torch.library and tensor subclasses.

Names, order and schemas follow from the fields of the records in pages.py.
"""

import types
import typing
from collections.abc import Iterator
from typing import Annotated, Any, TypeAlias

import torch
from torch import Tensor

from .pages import WRITTEN, AttentionSpec, Pages, StoredSide

Leaf: TypeAlias = Tensor | str | int | float | bool | torch.dtype | None


def _leaves(record: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield name and type of each field that is no record: `k_codes` for `codes` of `k`."""
    hints = typing.get_type_hints(record, include_extras=True)
    for name, kind in ((name, hints[name]) for name in record._fields):
        if hasattr(kind, "_fields"):
            yield from _leaves(kind, f"{prefix}{name}_")
        else:
            yield prefix + name, kind


# What `flatten` gives, by name.
PAGE_FIELDS = tuple(name for name, _ in _leaves(Pages))
_SIDE, _SPEC = len(StoredSide._fields), len(AttentionSpec._fields)


def flatten(pages: Pages) -> tuple[Leaf, ...]:
    """Return the fields of `pages.k`, then those of `pages.v`, then the others."""
    fields: tuple[Any, ...] = pages[2:]
    return (*pages.k, *pages.v, *fields)


def unflatten(leaves: tuple[Any, ...]) -> Pages:
    """Return the pages that `flatten` took apart."""
    k, v = leaves[:_SIDE], leaves[_SIDE : 2 * _SIDE]
    return Pages(StoredSide(*k), StoredSide(*v), *leaves[2 * _SIDE :])


def unflatten_spec(leaves: tuple[Any, ...]) -> tuple[AttentionSpec, Pages]:
    """Return a spec, whose fields come first, and the pages that follow."""
    return AttentionSpec(*leaves[:_SPEC]), unflatten(leaves[_SPEC:])


_TYPES = {
    Tensor: "Tensor", str: "str", int: "int", float: "float", bool: "bool",
    torch.dtype: "ScalarType",
}  # fmt: skip


def schema_of(record: Any, *, written: bool = False) -> str:
    """Return a record's fields as arguments in a schema of torch.library.

    `written`: whether the operation writes the tensors that are marked so.
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
