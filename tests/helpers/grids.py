"""Grids of test cases that cover pairs of choices instead of the full product."""

import itertools
from collections.abc import Sequence
from typing import Any


def pairwise(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return cases that contain every pair of values of any two axes, in a fixed order.

    Each case covers the most missing pairs. The full product of five axes has five to ten times
    more cases, but few faults of a kernel need three particular values at once.
    """
    axis_pairs = list(itertools.combinations(range(len(axes)), 2))

    def list_pairs(case: tuple[int, ...]) -> set[tuple[int, int, int, int]]:
        return {(i, j, case[i], case[j]) for i, j in axis_pairs}

    cases: list[tuple[int, ...]] = []
    all_cases = list(itertools.product(*(range(len(axis)) for axis in axes)))
    missing_pairs = set().union(*map(list_pairs, all_cases))
    while missing_pairs:
        best_case = max(all_cases, key=lambda case: len(list_pairs(case) & missing_pairs))
        cases.append(best_case)
        missing_pairs -= list_pairs(best_case)
    return [tuple(axis[i] for axis, i in zip(axes, case, strict=True)) for case in cases]
