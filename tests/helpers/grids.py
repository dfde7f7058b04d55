"""Grids of test cases that cover pairs of choices instead of the full product."""

import itertools
from collections.abc import Sequence
from typing import Any


def pairwise(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return cases in which every pair of values of two axes occurs, in a fixed order.

    This is a greedy cover. Faults of a kernel that need three particular values at once are rare,
    and the full product of five axes has five to ten times more cases.
    """
    columns = list(itertools.combinations(range(len(axes)), 2))

    def pairs(case: tuple[int, ...]) -> set[tuple[int, int, int, int]]:
        return {(i, j, case[i], case[j]) for i, j in columns}

    chosen: list[tuple[int, ...]] = []
    product = list(itertools.product(*(range(len(axis)) for axis in axes)))
    missing = set().union(*map(pairs, product))
    while missing:
        best = max(product, key=lambda case: len(pairs(case) & missing))
        chosen.append(best)
        missing -= pairs(best)
    return [tuple(axis[i] for axis, i in zip(axes, case, strict=True)) for case in chosen]
