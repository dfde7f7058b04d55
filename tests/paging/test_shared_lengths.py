"""Lengths that layers share: right after any order of calls, and advanced once in a step."""

import random
from collections.abc import Callable

import pytest
import torch

from hf_fp8kv.paging.shared_lengths import SharedLengths
from tests.helpers.counting import LengthsWritten

LAYERS, BATCH = 4, 3
CPU = torch.device("cpu")


def store(lengths: SharedLengths, layer: int, tokens: int) -> None:
    """What a layer does in a call, its first one among them."""
    if layer not in lengths.own:
        lengths.place(layer, BATCH, CPU)
    lengths.advance(layer, tokens, lengths.after(layer, tokens, 999, "torch"))


def make(layers: int = LAYERS) -> SharedLengths:
    lengths = SharedLengths()
    assert [lengths.add() for _ in range(layers)] == list(range(layers))
    return lengths


def check(lengths: SharedLengths, expected: list[int]) -> None:
    assert lengths.on_host() == expected
    for layer, own in lengths.own.items():
        assert lengths.of(layer).tolist() == [expected[layer]] * len(own)


@pytest.mark.parametrize("seed", range(60))
def test_any_order_of_calls(seed: int) -> None:
    """Beside one number for each layer."""
    choose = random.Random(seed)
    lengths, expected = make(), [0] * LAYERS

    def step(layers: list[int]) -> None:
        tokens = choose.choice([1, 1, 3])
        for layer in layers:
            # Now and then a layer is given another number of tokens than the others.
            count = tokens + choose.choice([0] * 20 + [2])
            store(lengths, layer, count)
            expected[layer] += count
            check(lengths, expected)

    def whole() -> None:
        step(choose.choice([list(range(LAYERS)), choose.sample(range(LAYERS), LAYERS)]))

    def some() -> None:
        step(choose.choices(range(LAYERS), k=choose.randint(1, 6)))

    def set_one() -> None:
        layer = choose.randrange(LAYERS)
        if layer in lengths.own:
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
        check(lengths, expected)


def test_a_step_advances_the_length_once() -> None:
    lengths = make()
    for layer in range(LAYERS):
        lengths.place(layer, BATCH, CPU)
    for layers in (range(LAYERS), [2, 0, 3, 1], range(LAYERS)):
        with LengthsWritten(BATCH) as written:
            for layer in layers:
                store(lengths, layer, 1)
        assert written.counts == {"add": 1, "copy_": 1}
    assert not lengths.apart


def test_layers_that_stay_out_have_no_part_in_it() -> None:
    """What is kept in Python is the same at each step, however often a layer stays out."""
    lengths = make()
    for layer in range(LAYERS):
        store(lengths, layer, 5)
    for step in range(4):
        with LengthsWritten(BATCH) as written:
            for layer in (0, 1, 3):
                store(lengths, layer, 1)
        assert (lengths.apart, lengths.late) == (([2], []) if step else ([], [2]))
    assert written.counts == {"add": 1, "copy_": 1}
    check(lengths, [9, 9, 5, 9])
    store(lengths, 2, 4)
    lengths.set([9] * LAYERS)
    assert not lengths.apart


def test_addresses_stay() -> None:
    lengths = make()
    for layer in range(LAYERS):
        lengths.place(layer, BATCH, CPU)
    before = [x.data_ptr() for layer in range(LAYERS) for x in lengths.tensors(layer)]
    for layers in ([0, 1, 2, 3], [0, 1], [0, 1], [3, 3, 2], [2, 1, 0]):
        for layer in layers:
            store(lengths, layer, 2)
    lengths.set([3, 3, 0, 3])
    lengths.resize(BATCH)
    assert [x.data_ptr() for layer in range(LAYERS) for x in lengths.tensors(layer)] == before
    lengths.resize(2 * BATCH)
    check(lengths, [3, 3, 0, 3])
    assert {len(x) for layer in range(LAYERS) for x in lengths.tensors(layer)} == {2 * BATCH}


def test_another_device_begins_with_the_same_length() -> None:
    lengths = make()
    for layer in range(LAYERS):
        store(lengths, layer, 7)
    # What torch takes for the same device stands for another one.
    second = torch.device("cpu", 0)
    lengths.place(1, BATCH, second)
    assert [x.tolist() for x in lengths.shared.values()] == [[7] * BATCH] * 2


def test_one_length_for_each_device() -> None:
    """Once for each in a step; a device is forgotten with its last layer."""
    other = torch.device("meta")
    lengths = make()
    for layer in range(LAYERS):
        store(lengths, layer, 7)
    for layer in (1, 2):
        lengths.move(layer, other)
    assert set(lengths.shared) == {CPU, other}
    with LengthsWritten(BATCH) as written:
        for layer in range(LAYERS):
            store(lengths, layer, 1)
    assert written.counts == {"add": 1, "copy_": 1, "add_": 1}
    assert lengths.of(1).device == other
    assert [lengths.of(layer).tolist() for layer in (0, 3)] == [[8] * BATCH] * 2
    for layer in (0, 3):
        lengths.move(layer, other)
    assert set(lengths.shared) == {other}
    with LengthsWritten(BATCH) as written:
        for layer in range(LAYERS):
            store(lengths, layer, 1)
    assert written.counts == {"add": 1, "copy_": 1}
