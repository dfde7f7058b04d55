"""Lengths that layers share: right after any order of calls, and advanced once in a step."""

import random
from collections import Counter
from collections.abc import Callable, Iterable

import pytest
import torch

from hf_fp8kv.paging.shared_lengths import SharedLengths
from tests.helpers.counting import LengthsWritten

LAYERS, BATCH = 4, 3
CPU = torch.device("cpu")


class Layers:
    """Layers that share lengths, beside one number for each of them."""

    def __init__(self) -> None:
        self.lengths, self.expected, self.placed = SharedLengths(), [0] * LAYERS, set()
        assert [self.lengths.add() for _ in range(LAYERS)] == list(range(LAYERS))

    def place(self, layer: int, device: torch.device = CPU) -> None:
        self.lengths.place(layer, BATCH, device)
        self.placed.add(layer)

    def store(self, layers: Iterable[int], tokens: int) -> Counter[str]:
        """Do what layers do in a call, their first one among them; return what is written."""
        lengths = self.lengths
        for layer in set(layers) - self.placed:
            self.place(layer)
        with LengthsWritten(BATCH) as written:
            for layer in layers:
                lengths.advance(layer, tokens, lengths.after(layer, tokens, 999, "torch"))
                self.expected[layer] += tokens
        return written.counts

    def check(self) -> None:
        assert self.lengths.on_host() == self.expected
        for layer in self.placed:
            assert set(self.lengths.of(layer).tolist()) == {self.expected[layer]}


@pytest.mark.parametrize("seed", range(20))
def test_any_order_of_calls(seed: int) -> None:
    choose = random.Random(seed)
    layers = Layers()
    lengths, expected = layers.lengths, layers.expected

    def step(called: list[int]) -> None:
        tokens = choose.choice([1, 1, 3])
        for layer in called:
            # Now and then a layer is given another number of tokens than the others.
            layers.store([layer], tokens + choose.choice([0] * 20 + [2]))
            layers.check()

    def whole() -> None:
        step(choose.choice([list(range(LAYERS)), choose.sample(range(LAYERS), LAYERS)]))

    def some() -> None:
        step(choose.choices(range(LAYERS), k=choose.randint(1, 6)))

    def set_one() -> None:
        layer = choose.randrange(LAYERS)
        if layer in layers.placed:
            expected[layer] = choose.randint(0, expected[layer])
            lengths.set_one(layer, expected[layer])

    def crop() -> None:
        expected[:] = [max(length - 2, 0) for length in lengths.on_host()]
        lengths.set(expected)

    def reset() -> None:
        expected[:] = [0] * LAYERS
        lengths.set(expected)

    changes: list[Callable[[], None]] = [whole, whole, whole, some, set_one, crop, reset]
    for _ in range(30):
        choose.choice(changes)()
        layers.check()


def test_a_step_advances_the_length_once() -> None:
    """Also if a layer stays out: however often, the others advance it once."""
    layers, once = Layers(), {"add": 1, "copy_": 1}
    layers.store(range(LAYERS), 1)
    for called in ([2, 0, 3, 1], range(LAYERS)):
        assert layers.store(called, 1) == once
    for step in range(4):
        assert layers.store((0, 1, 3), 1) == once or step < 2
    layers.check()
    layers.store([2], 4)
    layers.lengths.set([7] * LAYERS)
    layers.expected[:] = [7] * LAYERS
    assert layers.store(range(LAYERS), 1) == once, "all share it again"
    layers.check()


def test_addresses_stay() -> None:
    layers = Layers()
    for layer in range(LAYERS):
        layers.place(layer)
    lengths = layers.lengths

    def addresses() -> list[int]:
        return [x.data_ptr() for layer in range(LAYERS) for x in lengths.tensors(layer)]

    before = addresses()
    for called in ([0, 1, 2, 3], [0, 1], [0, 1], [3, 3, 2], [2, 1, 0]):
        layers.store(called, 2)
    layers.expected[:] = [3, 3, 0, 3]
    lengths.set(layers.expected)
    lengths.resize(BATCH)
    assert addresses() == before
    lengths.resize(2 * BATCH)
    layers.check()
    assert {len(x) for layer in range(LAYERS) for x in lengths.tensors(layer)} == {2 * BATCH}


def test_one_length_for_each_device() -> None:
    """Once for each in a step; a device is forgotten with its last layer."""
    other = torch.device("meta")
    layers, once = Layers(), {"add": 1, "copy_": 1}
    layers.store(range(LAYERS), 7)
    for layer in (1, 2):
        layers.lengths.move(layer, other)
    assert layers.store(range(LAYERS), 1) == {**once, "add_": 1}
    assert layers.lengths.of(1).device == other
    assert [layers.lengths.of(layer).tolist() for layer in (0, 3)] == [[8] * BATCH] * 2
    for layer in (0, 3):
        layers.lengths.move(layer, other)
    assert layers.store(range(LAYERS), 1) == once


def test_another_device_begins_with_the_same_length() -> None:
    layers = Layers()
    layers.store(range(LAYERS), 7)
    # What torch takes for the same device stands for another one.
    layers.place(1, torch.device("cpu", 0))
    layers.check()
