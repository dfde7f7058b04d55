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

    cases: list[tuple[int, ...]] = []
    all_cases = list(itertools.product(*(range(len(axis)) for axis in axes)))
    missing_pairs = set().union(*map(pairs, all_cases))
    while missing_pairs:
        best_case = max(all_cases, key=lambda case: len(pairs(case) & missing_pairs))
        cases.append(best_case)
        missing_pairs -= pairs(best_case)
    return [tuple(axis[i] for axis, i in zip(axes, case, strict=True)) for case in cases]
