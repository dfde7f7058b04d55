"""Pages of prefixes in a folder are found by everything that they depend on, and nothing else."""

import copy
import errno
import fcntl
import functools
import io
import os
import pickle
import shutil
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, ModelHook, add_hook_to_module
from torch.nn.modules.module import register_module_forward_hook
from transformers import LlavaConfig

from benchmarks.shared import make_environment
from hf_fp8kv import (
    ConfigError,
    FP8PagedCache,
    KVScales,
    LayerPlan,
    LayerScales,
    PrefixStore,
    disable,
    enable,
)
from hf_fp8kv.modeling.tensor_parallel import TensorParallel
from hf_fp8kv.prefix.file import Page, pack
from hf_fp8kv.prefix.pages import check_store
from tests.helpers.assertions import assert_same
from tests.helpers.margins import wide_margins
from tests.helpers.tiny_models import tiny
from tests.tools.store_kills import run_kills, run_together

pytestmark = pytest.mark.text

PAGE = 8
GREEDY = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "suppress_tokens": [0]}
LEAST_MARGIN = 1e-5
SLOW = (pytest.param(name, marks=pytest.mark.full) for name in ("mha", "softcap", "sinks"))
MODELS = ("gqa", "sliding", "sliding_and_full", "latent", *SLOW)
# Damages a file. The second path is a folder with files of a different model.
Damage = Callable[[Path, Path], Any]


class Reader:
    """A new model with the same weights and a new store, as in a new process."""

    def __init__(self, folder: Path, name: str = "gqa", max_bytes: int = 1 << 30, **keywords: Any):
        options = {key: keywords.pop(key) for key in list(keywords) if key in CONFIG}
        self.model, _ = tiny(name, max_position_embeddings=512, **options)
        self.store = PrefixStore(folder, max_bytes=max_bytes)
        self.keywords = {"page_size": PAGE, **keywords}
        self.calls: list[int] = []
        self._count_calls()
        self.enable()

    def enable(self) -> None:
        enable(self.model, prefix_store=self.store, **self.keywords)

    def _count_calls(self) -> None:
        """Count calls in a subclass with the same name, because a hook would disable the store."""
        stock, calls = type(self.model), self.calls

        @functools.wraps(stock.forward)
        def forward(model: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append(kwargs.get("input_ids", kwargs.get("inputs_embeds")).shape[1])
            return stock.forward(model, *args, **kwargs)

        members = {"forward": forward, "__qualname__": stock.__qualname__}
        self.model.__class__ = type(stock.__name__, (stock,), members)

    def new_cache(self) -> FP8PagedCache:
        return FP8PagedCache(self.model.config, prefill="stored", **self.keywords)

    def answer(self, ids: torch.Tensor, **keywords: Any) -> int:
        """Compare an answer with the answer without a store, and count the computed tokens."""
        keywords = {**GREEDY, **keywords}
        self.calls.clear()
        answer = self.model.generate(ids, **keywords)
        self.store.flush()
        computed = self.calls[0]
        if "num_beams" not in keywords:
            keywords["logits_processor"] = wide_margins(LEAST_MARGIN)
        enable(self.model, prefill="stored", **self.keywords)
        expected = self.model.generate(ids, **keywords)
        self.enable()
        assert_same(answer, expected, f"{computed} of {ids.shape[1]} tokens computed")
        return computed


CONFIG = ("rope_parameters", "sliding_window", "seed")


def words(count: int, rows: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.randint(2, 98, (rows, count), generator=torch.Generator().manual_seed(seed))


def files_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def size_of(folder: Path) -> int:
    return sum(
        path.lstat().st_size for path in folder.iterdir() if path.name != ".prefix_store.lock"
    )


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, as a different process does while it writes."""
    with open(folder / ".prefix_store.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


# -- pages that are found ---------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_a_new_process_computes_the_remaining_tokens(name: str, tmp_path: Path) -> None:
    prefix = words(61)
    assert Reader(tmp_path, name).answer(torch.cat([prefix, words(9, seed=1)], 1)) == 70
    for seed, extra in enumerate((3, 11, 24)):
        reader = Reader(tmp_path, name)
        ids = torch.cat([prefix, words(extra, seed=5 + seed)], 1)
        # 61 tokens fill seven pages and a part of the next page.
        assert reader.answer(ids) == 61 + extra - 56
        usage = reader.store.usage()
        assert (usage.hits, usage.misses, usage.tokens_found) == (1, 0, 56)
    # The store has all tokens, but a call needs a token: at the end of a page and after it.
    reader = Reader(tmp_path, name)
    assert reader.answer(prefix[:, :57]) == 1
    assert reader.answer(prefix[:, :56]) == 8
    assert reader.answer(prefix[:, :8]) == 8
    # A page depends on all tokens up to its end.
    for index in (31, 8, 7, 0):
        changed = prefix.clone()
        changed[0, index] = 2 + (changed[0, index] + 1) % 90
        assert reader.answer(changed) == 61 - index // PAGE * PAGE
        assert reader.answer(changed) == 61 - 56, "later pages were stored for this prefix"


def test_rows_of_a_batch_share_a_folder(tmp_path: Path) -> None:
    name = "sliding_and_full"
    ids, mask = words(45, rows=3), torch.ones(3, 45, dtype=torch.long)
    ids[1, :5] = mask[1, :5] = 0
    assert Reader(tmp_path, name).answer(ids, attention_mask=mask) == 45
    reader = Reader(tmp_path, name)
    extra = torch.cat([ids, words(4, rows=3, seed=3)], 1)
    extended_mask = torch.cat([mask, torch.ones(3, 4, dtype=torch.long)], 1)
    assert reader.answer(extra, attention_mask=extended_mask) == 49 - 40
    # Rows in a different order, a single row, and beams with the same prefix.
    order = torch.tensor([2, 1])
    assert reader.answer(extra[order], attention_mask=extended_mask[order]) == 49 - 48
    assert Reader(tmp_path, name).answer(extra[:1]) == 1
    assert Reader(tmp_path, name).answer(extra[2:], num_beams=3) == 1
    # All rows need the page, and different padding makes a different prompt.
    mixed = torch.cat([extra[:1], words(49, seed=8)])
    assert reader.answer(mixed) == 49
    different_mask = extended_mask.clone()
    different_mask[1, 5] = 0
    assert reader.answer(extra[1:2], attention_mask=different_mask[1:2]) == 49


def test_a_recording_cache_restores_tokens_before_the_window(tmp_path: Path) -> None:
    ids = words(61)
    Reader(tmp_path, "sliding").answer(ids)
    reader = Reader(tmp_path, "sliding")
    cache = reader.new_cache()
    cache.activate_past_recording()
    reader.model.generate(ids, past_key_values=cache, **GREEDY)
    assert cache.restored_tokens == 56
    cache.crop(20 - cache.get_seq_length())
    assert cache.get_seq_length() == 20


def test_a_chat_stores_its_answers(tmp_path: Path) -> None:
    reader = Reader(tmp_path, "gqa")
    cache = reader.new_cache()
    text = words(20)
    for turn in range(3):
        answer = reader.model.generate(text, past_key_values=cache, **GREEDY)
        text = torch.cat([answer, words(8, seed=turn)], 1)
    assert cache.memory_footprint().reused_tokens == 24 + 37
    fresh = Reader(tmp_path, "gqa")
    # The last prompt had 46 tokens, so the store has its full pages.
    assert fresh.answer(text) == text.shape[1] - 40
    cache = fresh.new_cache()
    fresh.model.generate(text, past_key_values=cache, **GREEDY)
    assert cache.memory_footprint().restored_tokens == 56 - 8 * (text.shape[1] < 57)


@pytest.mark.parametrize(
    "keywords",
    [
        {"dtype": "fp8"}, {"dtype": "auto"}, {"key_dtype": "auto"}, {"scales": 0.05},
        {"plan": LayerPlan.parse("int8 rotated", "fp8_e2m5 rotated")}, {"page_size": 16},
        {"offloading": True}, {"offloading": 6},
    ],
    ids=str,
)  # fmt: skip
def test_all_storage_options(keywords: dict[str, Any], tmp_path: Path) -> None:
    Reader(tmp_path, **keywords).answer(words(40))
    size = keywords.get("page_size", PAGE)
    assert Reader(tmp_path, **keywords).answer(words(40)) == 40 - 39 // size * size


def test_a_default_device_is_not_used(tmp_path: Path) -> None:
    """A kernel that writes to a tensor of this device would end the process."""
    readers, ids = [Reader(tmp_path, "sliding") for _ in "ab"], words(40)
    with torch.device("meta"):
        assert [reader.answer(ids) for reader in readers] == [40, 8]


# -- pages that are not found -----------------------------------------------------------------


def scales_of(factor: float = 1.0, center: float = 0.1) -> KVScales:
    values = ((0.02 + 0.01 * i, 0.03 * factor, center) for i in range(2))
    layers = [LayerScales(*(torch.full((2, 16), x) for x in each)) for each in values]
    return KVScales(dict(enumerate(layers)), "hf_fp8kv")


def test_changed_weights_find_no_pages(tmp_path: Path) -> None:
    """One changed value anywhere is enough, in place or in a new tensor."""
    ids = words(30)
    Reader(tmp_path).answer(ids)
    reader = Reader(tmp_path)
    assert reader.answer(ids) == 30 - 24
    # Parameters of all kinds, in both layers.
    names = [name for name, _ in reader.model.named_parameters()][::3]
    generator = torch.Generator().manual_seed(3)
    for name in names:
        tensor = reader.model.get_parameter(name)
        index = int(torch.randint(tensor.numel(), (), generator=generator))
        with torch.no_grad():
            before = tensor.view(-1)[index].clone()
            tensor.view(-1)[index] += 0.01
        assert reader.answer(ids) == 30, name
        with torch.no_grad():
            tensor.view(-1)[index] = before
        assert reader.answer(ids) == 6, name
    part = reader.model.model.layers[1].mlp.up_proj
    part.weight = torch.nn.Parameter(part.weight * 1.0001)
    assert reader.answer(ids) == 30


# Stands for the hook of PEFT that selects an adapter for each prompt.
_with_adapters = types.FunctionType(
    (lambda _module, _args, _kwargs, *, adapter_names: None).__code__, {"__name__": "peft.hooks"}
)


def test_changes_without_a_version_count_are_detected(tmp_path: Path) -> None:
    """Merged adapters write through `.data`, and adapters per prompt are hook arguments."""
    ids = words(30)
    reader = Reader(tmp_path)
    assert reader.answer(ids) == 30
    for layer in (0, 1):
        weight = reader.model.model.layers[layer].self_attn.q_proj.weight
        version = weight._version
        weight.data += 0.001 * torch.randn(weight.shape, generator=torch.manual_seed(layer))
        assert weight._version == version
        assert reader.answer(ids) == 30, layer
    module = reader.model.model.layers[0].mlp
    for name in ("first", "second"):
        hook = partial(_with_adapters, adapter_names=[name])
        handle = module.register_forward_pre_hook(hook, with_kwargs=True)
        assert reader.answer(ids) == 30, name
        assert reader.answer(ids) == 6, name
        handle.remove()
    assert reader.answer(ids) == 6


def test_different_options_find_no_pages(tmp_path: Path) -> None:
    ids = words(30)
    changed = {"rope_type": "default", "rope_theta": 9999.0}
    variants: list[dict[str, Any]] = [
        {}, {"dtype": "fp8"}, {"dtype": "int8"}, {"key_dtype": "fp8"}, {"value_dtype": "int8"},
        {"plan": ("fp8_e3m4 rotated", "fp8_e3m4")}, {"plan": ("fp8_e3m4", "fp8_e3m4 rotated")},
        {"page_size": 16}, {"scales": 0.05},
        {"scales": 0.06}, {"scales": scales_of()}, {"scales": scales_of(1.01)},
        {"scales": scales_of(center=0.11)},
        {"seed": 1}, {"rope_parameters": changed}, {"name": "sliding", "sliding_window": 8},
        {"name": "sliding", "sliding_window": 9}, {"backend": "torch"},
    ]  # fmt: skip
    for variant in variants:
        assert Reader(tmp_path, **variant).answer(ids) == 30, variant
    for variant in variants:
        assert Reader(tmp_path, **variant).answer(ids) < 30, variant


def test_tokens_that_may_differ_from_the_prompt_are_not_stored(tmp_path: Path) -> None:
    reader = Reader(tmp_path)
    cache = reader.new_cache()
    ids = words(40)
    with torch.no_grad():
        # A direct call with tokens that are not in the prompt.
        reader.model(input_ids=words(16, seed=9), past_key_values=cache)
    reader.model.generate(ids, past_key_values=cache, **GREEDY)
    assert not files_of(tmp_path)
    # Positions that do not start at 0, and a model in training.
    positions = torch.arange(3, 43)[None]
    reader.model.generate(ids, position_ids=positions, **GREEDY)
    reader.model.train()
    reader.model.generate(ids, **GREEDY)
    reader.model.eval()
    reader.model.model.layers[1].mlp.train()  # as in the dropout of a new adapter
    reader.model.generate(ids, **GREEDY)
    reader.model.eval()
    assert not files_of(tmp_path)
    assert reader.answer(ids) == 40


def _steer(_module: Any, _args: Any, output: Any) -> Any:
    return output * 1.5


def _replace_forward(model: Any) -> None:
    module = model.model.layers[0].mlp
    stock = module.forward
    module.forward = functools.wraps(stock)(lambda states: stock(states) * 0.5)


def _replace_under_accelerate(model: Any) -> None:
    _replace_forward(model)
    add_hook_to_module(model.model.layers[0].mlp, AlignDevicesHook("cpu"))


class _Steer(ModelHook):
    def post_forward(self, module: Any, output: Any) -> Any:
        return output * 1.5


def _add_tokens(model: Any, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Prepend embeddings of two tokens to the prompt, as PEFT's prompt tuning does."""
    inputs = stock(*args, **kwargs) | {"position_ids": None}
    if kwargs.get("is_first_iteration"):
        embeds = model.get_input_embeddings()(inputs.pop("input_ids"))
        inputs["inputs_embeds"] = torch.cat([embeds[:, :2] * 2, embeds], 1)
    return inputs


def _add_tokens_in_method(model: Any, package: str = __name__) -> None:
    stock = type(model).prepare_inputs_for_generation.__get__(model)
    code = types.FunctionType(_add_tokens.__code__, {"__name__": package, "torch": torch})
    model.prepare_inputs_for_generation = partial(code, model, stock)


def _add_tokens_in_class(model: Any) -> None:
    stock = type(model).prepare_inputs_for_generation
    members = {
        "prepare_inputs_for_generation": lambda model, *args, **kwargs: _add_tokens(
            model, stock.__get__(model), *args, **kwargs
        ),
        "__qualname__": type(model).__qualname__,
    }
    model.__class__ = type("Tuned", (type(model),), members)


CODE: dict[str, Callable[[Any], Any]] = {
    "a hook": lambda model: model.model.layers[0].mlp.register_forward_hook(_steer),
    "a hook before": lambda model: model.model.norm.register_forward_pre_hook(lambda *_: None),
    "a hook of all modules": lambda _: register_module_forward_hook(lambda *_: None),
    "a forward": _replace_forward,
    "a forward under accelerate": _replace_under_accelerate,
    "a hook in accelerate": lambda model: add_hook_to_module(model.model.layers[0].mlp, _Steer()),
    "more tokens": _add_tokens_in_method,
    "more tokens by PEFT": partial(_add_tokens_in_method, package="peft.peft_model"),
}


@pytest.mark.parametrize("change", CODE.values(), ids=CODE.keys())
def test_code_that_may_change_hidden_states_disables_the_store(
    change: Callable[[Any], Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Such a model neither reads nor writes pages, and a warning gives the reason."""
    assert Reader(tmp_path / "clean").answer(words(40)) == 40
    tuned = Reader(tmp_path / "tuned", dtype="fp8")
    handle = change(tuned.model)
    for folder in ("tuned", "clean"):
        tuned.store = PrefixStore(tmp_path / folder)
        tuned.enable()
        before = files_of(tmp_path / folder)
        for _ in range(2):
            tuned.model.generate(words(40), **GREEDY)
        tuned.store.flush()
        usage = tuned.store.usage()
        assert (usage.hits, usage.misses, files_of(tmp_path / folder)) == (0, 0, before)
    if hasattr(handle, "remove"):
        handle.remove()
    assert len([x for x in caplog.messages if "prefix_store: expected" in x]) >= 1


@pytest.mark.parametrize("missing", [torch.empty(0), torch.empty(2, device="meta")])
def test_weights_outside_this_process_are_refused(missing: torch.Tensor, tmp_path: Path) -> None:
    """accelerate offloads weights, and DeepSpeed has weights in other processes."""
    reader = Reader(tmp_path)
    reader.model.model.layers[1].mlp.up_proj.weight = torch.nn.Parameter(missing)
    with pytest.raises(ConfigError, match="expected all weights in this process"):
        reader.enable()


def test_tokens_added_by_a_model_are_not_stored(tmp_path: Path) -> None:
    tuned = Reader(tmp_path)
    _add_tokens_in_class(tuned.model)
    cache = tuned.new_cache()
    answer = tuned.model.generate(words(40), past_key_values=cache, **GREEDY)
    tuned.store.flush()
    assert not files_of(tmp_path)
    repeated = tuned.model.generate(words(40), past_key_values=cache, **GREEDY)
    assert_same(repeated, answer, "a cache that holds more tokens than the prompt")


def test_code_of_known_libraries_keeps_the_store_enabled(tmp_path: Path) -> None:
    reader = Reader(tmp_path)
    layers = reader.model.model.layers
    # A compiled layer would take ten times as long, because its cache grows.
    layers[0].mlp.forward = torch.compile(layers[0].mlp.forward, backend="eager")
    layers[1].mlp.forward = torch.no_grad()(layers[1].mlp.forward)
    add_hook_to_module(reader.model.model.layers[0], AlignDevicesHook("cpu", io_same_device=True))
    with torch.no_grad():
        reader.model(input_ids=words(4), output_hidden_states=True)  # transformers adds hooks
    assert reader.answer(words(40)) == 40
    assert reader.answer(words(40)) == 8
    assert Reader(tmp_path).answer(words(40)) == 8


@pytest.mark.parametrize("trains", [False, True], ids=["weights", "training"])
def test_a_model_may_change_during_a_chat(trains: bool, tmp_path: Path) -> None:
    """Pages of old weights or from training are neither stored later nor used."""
    reader = Reader(tmp_path)
    cache = reader.new_cache()
    reader.model.train(trains)
    answer = reader.model.generate(words(40), past_key_values=cache, **GREEDY)
    reader.model.eval()
    if not trains:
        with torch.no_grad():
            reader.model.lm_head.weight.mul_(1.01)
            reader.model.model.layers[0].mlp.up_proj.weight.mul_(1.1)
    extra = torch.cat([answer, words(5)], 1)
    for reused in (0, extra.shape[1] - 1):
        reader.calls.clear()
        reader.model.generate(extra, past_key_values=cache, **GREEDY)
        assert reader.calls[0] == extra.shape[1] - reused
    assert reader.answer(extra) == extra.shape[1] - 48


# -- bad files --------------------------------------------------------------------------------


def test_a_damaged_file_may_be_removed_by_a_different_process(tmp_path: Path) -> None:
    stores = [PrefixStore(tmp_path) for _ in "ab"]
    keys = store_pages(stores[0], 3)
    stores[0].flush()
    for store in stores:
        store.refuse(keys[0], ValueError("damaged"))
    for store in stores:
        assert len(store_pages(store, 3)) == 3
        assert len([*store.read(keys, _take_any)]) == 3


def _take_any(_page: Page) -> None:
    """Accept every page."""


def _set(name: str, *values: Any) -> Callable[[Any, Any], Any]:
    """Return a function that changes an entry of the last layer, or drops it without a value."""

    def change(_: list[torch.Tensor], metadata: Any) -> Any:
        metadata[1].pop(name, None)
        metadata[1].update(dict.fromkeys([name][: len(values)], *values))
        return metadata

    return change


def _replace(change: Callable[[torch.Tensor], list[torch.Tensor]]) -> Callable[[Any, Any], Any]:
    """Return a function that replaces the tensor of the last layer."""
    return lambda rows, metadata: rows.extend(change(rows.pop())) or metadata


# Intact files with valid names and invalid metadata, as an attacker can write them.
FORGERIES: list[Callable[[Any, Any], Any]] = [
    *(lambda _, metadata, new=new: new for new in (None, [], "x", {}, {"layers": []}, 0, [[], []])),
    lambda _, metadata: metadata[:1],
    lambda _, metadata: metadata * 2,
    *map(_set, ("dtypes", "shape")),
    *(_set("dtypes", x) for x in (["load", "save"], ["int64", 3], ["quint8"] * 2, [], None)),
    *(_set("shape", x) for x in ([3, 16, 16], [2, 16], [2, 16, 16, 1], [2**40, 0, 0], [-2, 16, 16],
                                 ["2", 16, 16], [2.5, 16, 16], [2**70, 16, 16], [[2], 16, 16],
                                 [2**31 - 1] * 3)),
    *(_set(name, 1) for name in ("index", "length", "plan", "indexer")),
    *map(_replace, (
        lambda x: [x[None]], lambda x: [x.view(torch.int8)], lambda x: [x.float()],
        lambda x: [x.view(torch.int16)], lambda x: [torch.cat([x, x])], lambda x: [],
        lambda x: [x, x.clone()], lambda x: [x[:-1]],
    )),
]  # fmt: skip


def forge(change: Callable[[Any, Any], Any]) -> Damage:
    """Return a damage that changes the contents of a page and writes an intact file."""

    def damage(path: Path, _: Path) -> None:
        (page,) = PrefixStore(path.parent).read([path.stem], _take_any)
        assert page is not None
        rows = [*page.rows]
        metadata = change(rows, copy.deepcopy(page.facts))
        path.write_bytes(pack(path.stem, Page(rows, metadata)))

    return damage


def rewrite(change: Callable[[bytes], bytes]) -> Damage:
    return lambda path, _: path.write_bytes(change(path.read_bytes()))


def flip(seed: int) -> Damage:
    """Return a damage that flips one bit, in the header or in the data."""

    def change(good: bytes) -> bytes:
        flipped = bytearray(good)
        flipped[(len(good) * seed // 24 + seed) % len(good)] ^= 1 << seed % 8
        return bytes(flipped)

    return rewrite(change)


def link(target: str) -> Damage:
    return lambda path, outside: (path.unlink(), path.symlink_to(outside / target or path))


DAMAGES: list[Damage] = [
    *(rewrite(lambda good, n=n: good[: len(good) * n // 10]) for n in range(10)),
    *map(flip, range(24)),
    *map(forge, FORGERIES),
    # A page of a different model, and a different page of this model.
    lambda path, outside: shutil.copy(files_of(outside)[0], path),
    lambda path, _: shutil.copy(next(x for x in files_of(path.parent) if x != path), path),
    *map(link, ("good", "none", "")),
    lambda path, _: (path.unlink(), os.mkfifo(path)),
    # A header length of 2**62, a different format, additional bytes, and a header of brackets.
    rewrite(lambda good: (1 << 62).to_bytes(8, "little") + good[8:]),
    rewrite(lambda good: pickle.dumps({"k": good})),
    rewrite(lambda good: good + b"\0"),
    rewrite(lambda _: (20_000).to_bytes(8, "little") + b"[" * 20_000),
]


def keys_of(folder: Path) -> list[str]:
    """Return the keys of the pages of the last prompt, from its first page on."""
    return [path.stem for path in sorted(files_of(folder), key=lambda x: -x.stat().st_mtime_ns)]


# All kinds of damage. The full tier has all cuts, bits and forgeries.
@pytest.mark.parametrize(
    "damages",
    [[*DAMAGES[:-11:6], *DAMAGES[-11:]], pytest.param(DAMAGES, marks=pytest.mark.full)],
    ids=["some", "all"],
)
def test_bad_files(damages: list[Damage], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, outside, ids = tmp_path / "store", tmp_path / "other", words(40)
    Reader(folder, "sliding").answer(ids)
    Reader(outside, "sliding", dtype="fp8").answer(ids)
    shutil.copy(folder / f"{keys_of(folder)[0]}.safetensors", outside / "good")
    reader = Reader(folder, "sliding")
    for case, damage in enumerate(damages):
        page = case % 4
        path = folder / f"{keys_of(folder)[page]}.safetensors"
        damage(path, outside)
        caplog.clear()
        assert reader.answer(ids) == 40 - PAGE * page, case
        assert len([x for x in caplog.records if "is not a page" in x.message]) == 1, case
        assert reader.answer(ids) == 8, case
        assert not path.is_symlink()
        assert [*reader.store.read([path.stem], _take_any)], "stored again"
    assert reader.store.usage().files == 5


@pytest.mark.parametrize("is_empty", [True, False])
def test_a_folder_instead_of_a_file(
    is_empty: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ids = words(40)
    Reader(tmp_path).answer(ids)
    path = tmp_path / f"{keys_of(tmp_path)[1]}.safetensors"
    path.unlink()
    path.mkdir()
    if not is_empty:
        (path / "file").write_text("")
    reader = Reader(tmp_path)
    for extra in (0, 0, 9):
        assert reader.answer(torch.cat([ids, words(extra)], 1)) == 40 + extra - PAGE
    assert path.is_dir()
    assert len(caplog.records) == 1, "one warning"


def _other_sizes(heads: int, dim: int, dtype: str) -> Callable[[Any, Any], Any]:
    """Return a function that gives a page the sizes of a different model with the same layers."""

    def change(rows: list[torch.Tensor], metadata: Any) -> Any:
        for i, layer in enumerate(metadata):
            has_scales = len(rows[i]) > 2 * PAGE * 2 * 16
            layer.update(shape=[heads, dim, dim], dtypes=[dtype] * 2)
            size = heads * PAGE * (2 * dim + 4 * has_scales)
            rows[i] = torch.ones(size, dtype=torch.uint8)
        return metadata

    return change


# Grid: Each wrong size with one storage option, because sizes are checked first.
@pytest.mark.parametrize(
    ("sizes", "keywords"),
    [
        ((3, 16, "float32"), {}), ((2, 8, "float32"), {"scales": scales_of()}),
        ((2, 16, "float16"), {"offloading": True}), ((1 << 40, 0, "float32"), {"scales": 0.05}),
    ],
    ids=str,
)  # fmt: skip
def test_pages_of_a_different_model_are_refused(
    sizes: tuple[int, int, str], keywords: dict[str, Any], tmp_path: Path
) -> None:
    """The sizes of the model are not known before its first layer has computed."""
    ids = words(40, rows=2)
    Reader(tmp_path, **keywords).answer(ids)
    for path in files_of(tmp_path):
        forge(_other_sizes(*sizes))(path, tmp_path)
    reader = Reader(tmp_path, **keywords)
    cache = reader.new_cache()
    reader.model.generate(ids, past_key_values=cache, **GREEDY)
    # With static scales, the first page shows the number of heads.
    refused = 1 if "scales" in keywords else 8
    assert (cache.restored_tokens, reader.store.usage().files_refused) == (0, refused)
    for options in ({}, {"prefill_chunk_size": 7}):
        reader.calls.clear()
        reader.answer(ids, **options)
        assert sum(reader.calls) >= 40
    # If a page is refused before its use, the next page is refused at the next call.
    assert [reader.answer(ids) for _ in range(9)][-1] == 8, "all pages were stored again"


def test_a_different_process_may_store_the_pages_first(tmp_path: Path) -> None:
    """A different process stores the pages while this process copies its pages."""
    stores, pages = [PrefixStore(tmp_path) for _ in "ab"], [Page([numbers(3)], {})] * 2
    keys = ["a" * 64, "b" * 64]

    def copy_pages(indices: list[int]) -> list[Page]:
        stores[1].write(keys, lambda _: pages)
        stores[1].flush()
        return [pages[index] for index in indices]

    stores[0].write(keys, copy_pages)
    assert [store.usage().bytes_written for store in stores] == [0, size_of(tmp_path)]


@pytest.mark.parametrize("number", [errno.EACCES, errno.EMFILE, errno.EIO, None])
def test_an_unreadable_file_is_kept(
    number: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """The file may be intact, so it is ignored and kept for processes that can read it."""
    Reader(tmp_path).answer(words(40))
    reader, opened = Reader(tmp_path), os.open

    def refuse(path: Any, *args: Any, **kwargs: Any) -> int:
        if str(path).endswith(".safetensors"):
            if number is None:
                raise MemoryError
            raise OSError(number, os.strerror(number), str(path))
        return opened(path, *args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", refuse)
        for _ in range(2):
            assert reader.answer(words(40)) == 40
    assert ("MemoryError" if number is None else os.strerror(number)) in caplog.text
    assert len(caplog.records) == 1
    assert Reader(tmp_path).answer(words(40)) == 8


# -- the disk ---------------------------------------------------------------------------------


def test_the_least_recently_used_pages_are_removed(tmp_path: Path) -> None:
    Reader(tmp_path).answer(words(40))
    page = files_of(tmp_path)[0].stat().st_size
    limit = 13 * page
    reader = Reader(tmp_path, max_bytes=limit)
    for seed in range(1, 7):
        reader.answer(words(40, seed=seed))
        reader.answer(words(40))  # used after each prompt
        assert size_of(tmp_path) <= limit
    fresh = Reader(tmp_path, max_bytes=limit)
    assert fresh.answer(words(40)) == 8
    assert fresh.answer(words(40, seed=6)) == 8
    assert fresh.answer(words(40, seed=2)) == 40
    # The store keeps the first pages of a prompt that does not fit.
    small = Reader(tmp_path, max_bytes=3 * page)
    small.answer(words(90, seed=20))
    assert size_of(tmp_path) <= 3 * page
    assert small.answer(words(90, seed=20)) == 90 - 24
    tiny_store = Reader(tmp_path, max_bytes=page // 2)
    tiny_store.answer(words(40, seed=30))
    assert tiny_store.store.usage().files == 0


def test_a_smaller_bound_holds_from_the_first_lookup(tmp_path: Path) -> None:
    Reader(tmp_path).answer(words(40))
    Reader(tmp_path).answer(words(40, seed=1))
    page = files_of(tmp_path)[0].stat().st_size
    store = PrefixStore(tmp_path, max_bytes=7 * page)
    assert store.usage().files == 10, "no page was looked up"
    assert Reader(tmp_path, max_bytes=7 * page).answer(words(40, seed=1)) == 8
    assert size_of(tmp_path) <= 7 * page
    assert Reader(tmp_path, max_bytes=7 * page).answer(words(40)) == 40 - 16
    # A page that is larger than the bound replaces no page.
    small = Reader(tmp_path, max_bytes=7 * page, page_size=128)
    small.answer(words(250, seed=3))
    assert small.store.usage().files == 7


def test_a_smaller_bound_does_not_wait_for_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Reader(tmp_path).answer(words(40))
    with locked(tmp_path):
        monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("waited"))
        assert not [*PrefixStore(tmp_path, max_bytes=1).read(["x"], _take_any)]
        assert len(files_of(tmp_path)) == 5


@pytest.mark.parametrize("failure", ["write", "replace", "lock", "Windows"])
def test_a_full_disk_only_stops_storing(
    failure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    Reader(tmp_path).answer(words(40))
    reader = Reader(tmp_path)

    def fail(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def lack_links(*_: Any, **keywords: Any) -> None:
        if not keywords.get("follow_symlinks", True):
            raise NotImplementedError("utime: follow_symlinks unavailable on this platform")

    class Full(io.FileIO):
        def write(self, data: Any) -> int:
            super().write(data[:100])
            return fail() or 0

    with monkeypatch.context() as patched:
        if failure == "lock":
            patched.setattr(fcntl, "flock", fail)
        elif failure == "Windows":
            patched.setitem(sys.modules, "fcntl", None)
            patched.setattr(os, "utime", lack_links)
        elif failure == "replace":
            patched.setattr(os, failure, fail)
        else:
            patched.setattr(Path, "open", Full)
        for seed in (1, 2):
            assert reader.answer(words(40, seed=seed)) == 40
        assert reader.answer(words(40)) == 8, "stored pages are still read"
    assert len([x for x in caplog.records if "stores nothing" in x.message]) == 1
    assert not list(tmp_path.glob(".*.part"))
    assert len(files_of(tmp_path)) == 5


@pytest.mark.parametrize("error", [MemoryError, torch.OutOfMemoryError])
def test_a_copy_without_memory_is_not_stored(
    error: type[Exception], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: list[int]) -> list[Page]:
        raise error("CUDA out of memory")

    store = PrefixStore(tmp_path)
    store.write(["a" * 64], fail)
    assert "no memory for a copy" in caplog.text
    assert not files_of(tmp_path)
    store_pages(store, 3)
    store.flush()
    assert len(files_of(tmp_path)) == 3, "pages are stored when memory is free again"


def test_pages_queued_for_writing_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hf_fp8kv.prefix.store._LOCK_TIMEOUT", 60.0)
    reader = Reader(tmp_path)
    with locked(tmp_path):
        ids = words(40)
        answer = reader.model.generate(ids, **GREEDY)
        assert not files_of(tmp_path)
        repeated = reader.model.generate(ids, **GREEDY)
        assert reader.calls[0] == 40
        assert 8 in reader.calls, "queued pages are found"
        assert_same(repeated, answer)
        assert reader.store.counts()["bytes_read"] == 0
    reader.store.flush()
    assert len(files_of(tmp_path)) == 5
    assert Reader(tmp_path).answer(ids) == 8


def store_pages(store: PrefixStore, count: int, seed: int = 0) -> list[str]:
    """Store a prompt of `count` pages, and return their keys."""
    keys = [f"{seed:032x}{number:032x}" for number in range(count)]
    store.write(keys, lambda indices: [Page([numbers(at)], {"at": at}) for at in indices])
    return keys


def numbers(at: int) -> torch.Tensor:
    return torch.full((12,), at % 256, dtype=torch.uint8)


def run_script(script: str, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a separate process, with the folder as its argument."""
    command = [sys.executable, *options, "-c", script, str(folder)]
    return subprocess.run(command, env=make_environment(), capture_output=True, text=True)


IMPORTS = """
import atexit, fcntl, os, signal, sys, threading, time
from hf_fp8kv import PrefixStore
from hf_fp8kv.prefix import store as store_module
from tests.prefix.test_store import _take_any, files_of, store_pages
"""


def test_an_interrupted_flush_is_repeated_at_the_end(tmp_path: Path) -> None:
    """An interrupted wait is repeated, at the latest when the process ends.

    After the end of the main thread, the interpreter starts no threads or does not wait for them.
    """
    script = f"""{IMPORTS}
# A process that starts in the background ignores SIGINT.
signal.signal(signal.SIGINT, signal.default_int_handler)
store_module._LOCK_TIMEOUT = 60
store = PrefixStore(sys.argv[1])
held = os.open(store.path / '.prefix_store.lock', os.O_CREAT | os.O_RDWR)
def late():
    while threading.main_thread().is_alive():
        time.sleep(0.01)
    store_pages(store, 300, 2)
    store.flush()
    print(len([*store.read(keys, _take_any)]))
for seed in range(2):
    fcntl.flock(held, fcntl.LOCK_EX)
    keys = store_pages(store, 100, seed)
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        store.flush()
        sys.exit('was not interrupted')
    except KeyboardInterrupt:
        fcntl.flock(held, fcntl.LOCK_UN)
    if not seed:
        store.flush()
        assert len(files_of(store.path)) == 100
atexit.register(late)
sys.exit(3)
"""
    process = run_script(script, tmp_path)
    assert (process.returncode, process.stdout, process.stderr) == (3, "100\n", "")
    assert len(files_of(tmp_path)) == 500


def test_a_thread_that_touches_pages_does_not_write_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, is_touching, may_continue = PrefixStore(tmp_path), threading.Event(), threading.Event()
    replace, writers = os.replace, []

    def touch(*_: Any, **__: Any) -> None:
        is_touching.set()
        assert may_continue.wait(60)

    def put(*args: Any) -> None:
        writers.append(threading.current_thread())
        may_continue.set()
        toucher.join(0.2)  # this thread has the lock, so a writer of the next prompt would wait
        replace(*args)

    monkeypatch.setattr(os, "utime", touch)
    monkeypatch.setattr(os, "replace", put)
    toucher = threading.Thread(target=store.touch, args=(["a" * 64],))
    toucher.start()
    assert is_touching.wait(60)
    store_pages(store, 1)
    store_pages(store, 1, 1)
    store.flush()
    assert len(files_of(tmp_path)) == 2
    toucher.join()
    assert toucher not in writers


@pytest.mark.parametrize(
    ("error", "message"),
    [(ZeroDivisionError, "ZeroDivisionError"), (MemoryError, "no memory for a copy")],
)
def test_an_error_with_one_prompt_does_not_affect_other_prompts(
    error: type[Exception], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    store, replace = PrefixStore(tmp_path), os.replace

    def fail(source: Any, target: Path) -> None:
        if target.name.startswith(f"{0:032x}"):
            raise error
        replace(source, target)

    monkeypatch.setattr(os, "replace", fail)
    for seed in range(3):
        store_pages(store, 3, seed)
    store.flush()
    assert message in caplog.text
    assert len(files_of(tmp_path)) == 6


def test_a_write_waits_if_too_many_bytes_are_queued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hf_fp8kv.prefix.store._MAX_QUEUED_BYTES", 50 * 12)
    store = PrefixStore(tmp_path)
    for seed in range(20):
        store_pages(store, 20, seed)
        assert len(files_of(tmp_path)) >= 20 * (seed + 1) - 70
    store.flush()
    assert len(files_of(tmp_path)) == 400


@pytest.mark.parametrize("missing", [0, 7, 50])
def test_pages_are_read_in_order(
    missing: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = PrefixStore(tmp_path)
    keys = store_pages(store, 50)
    store.flush()
    for key in keys[missing : missing + 1]:
        (tmp_path / f"{key}.safetensors").unlink()
    requested: list[str] = []
    monkeypatch.setattr("hf_fp8kv.prefix.store.NUM_READERS", 3)

    def requests() -> Iterator[str]:
        for key in keys:
            requested.append(key)
            yield key

    indices = []
    for page in PrefixStore(tmp_path).read(requests(), _take_any):
        indices.append(page.facts["at"])
        assert len(requested) <= len(indices) + 3
        assert torch.equal(page.rows[0], numbers(page.facts["at"]))
    assert indices == list(range(missing))


@pytest.mark.parametrize("allowed", [0, 2])
def test_pages_are_written_and_read_if_no_thread_starts(
    allowed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, started = threading.Thread.start, []

    def fail(thread: threading.Thread) -> None:
        if len(started) == allowed:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr("hf_fp8kv.prefix.store.NUM_READERS", 8)
    monkeypatch.setattr(threading.Thread, "start", fail)
    store = PrefixStore(tmp_path)
    keys = store_pages(store, 20)
    assert allowed or len(files_of(tmp_path)) == 20, "written at once"
    store.flush()
    indices = [page.facts["at"] for page in PrefixStore(tmp_path).read(keys, _take_any)]
    assert indices == list(range(20))


def test_a_slow_writer_is_waited_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_fp8kv.prefix.store._LOCK_TIMEOUT", 0.05)
    monkeypatch.setattr("hf_fp8kv.prefix.store._SHORT_LOCK_TIMEOUT", 0.0)
    reader = Reader(tmp_path)
    with locked(tmp_path):
        assert reader.answer(words(40)) == 40
        assert not files_of(tmp_path)
        monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("waited again"))
        assert reader.answer(words(40)) == 40
    assert reader.answer(words(40)) == 40
    assert len(files_of(tmp_path)) == 5


def test_a_fork_does_not_keep_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is forked while a different thread writes has a copy of each open file."""
    replace = os.replace
    copies: list[int] = []

    def fork(*args: Any) -> None:
        handles = Path("/proc/self/fd").iterdir()
        lock_handles = [
            int(x.name)
            for x in handles
            if x.is_symlink() and x.resolve().name == ".prefix_store.lock"
        ]
        copies.extend(map(os.dup, lock_handles))
        replace(*args)

    monkeypatch.setattr("hf_fp8kv.prefix.store._LOCK_TIMEOUT", 0.05)
    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", fork)
        Reader(tmp_path).answer(words(40))
    assert copies
    Reader(tmp_path).answer(words(40, seed=1))
    assert len(files_of(tmp_path)) == 10
    for handle in copies:
        os.close(handle)


@pytest.mark.full
def test_a_fork_while_a_prompt_is_written(tmp_path: Path) -> None:
    """The fork is in a separate process, because it may disturb the threads of this process."""
    script = f"""{IMPORTS}
store = PrefixStore(sys.argv[1])
held = os.open(store.path / '.prefix_store.lock', os.O_CREAT | os.O_RDWR)
fcntl.flock(held, fcntl.LOCK_EX)
keys = store_pages(store, 3)
child = os.fork()
fcntl.flock(held, fcntl.LOCK_UN)
if not child:
    signal.alarm(60)
    store_pages(store, 3, 1)
    store.flush()
    os._exit(store.usage().files < 3)
sys.exit(os.waitpid(child, 0)[1] != 0)
"""
    assert run_script(script, tmp_path, "-W", "ignore").returncode == 0
    assert len(files_of(tmp_path)) == 6


def test_foreign_files_are_kept_and_unfinished_files_removed(tmp_path: Path) -> None:
    (tmp_path / "README").write_text("mine")
    (tmp_path / "model.safetensors").write_bytes(b"x" * 5000)
    for name in ("folder", "folder.part"):
        (tmp_path / name).mkdir()
    for name in ("film.part", ".lock"):
        (tmp_path / name).write_text("mine")
    (tmp_path / f".{64 * chr(97)}.safetensors.part").write_text("of a killed process")
    (tmp_path / f".{64 * chr(98)}.safetensors.part").symlink_to(tmp_path / "README")
    reader = Reader(tmp_path, max_bytes=1000)
    reader.answer(words(40))
    assert {path.name for path in tmp_path.iterdir() if path.suffix != ".safetensors"} == {
        "README", "folder", "folder.part", "film.part", ".lock", ".prefix_store.lock",
    }  # fmt: skip
    assert (tmp_path / ".lock").read_text() == (tmp_path / "README").read_text() == "mine"
    assert (tmp_path / "model.safetensors").exists()


# -- several processes ------------------------------------------------------------------------


@pytest.mark.parametrize("kills", [3, pytest.param(80, marks=pytest.mark.full)])
def test_kills_while_writing(kills: int, tmp_path: Path) -> None:
    result = run_kills(tmp_path, kills=kills)
    assert (result["wrong"], result["over"]) == (0, 0), result
    assert result["written"] > 0


@pytest.mark.full
def test_two_processes_share_a_folder(tmp_path: Path) -> None:
    result = run_together(tmp_path, processes=2)
    assert (result["wrong"], result["over"]) == (0, 0), result
    assert result["found"] > 0


# -- refusals, copies -------------------------------------------------------------------------

REFUSED: list[tuple[str, str, dict[str, Any]]] = [
    ("gqa", "prefill='stored'", {"prefill": "exact"}),
    ("gqa", "max_cache_len", {"max_cache_len": 64}),
    ("gqa", "split", {"tensor_parallel": TensorParallel(0, 2)}),
    ("gqa", "first call", {"plan": "fp8 centered"}),
    ("gqa", "a different kind", {"skip_layers": [0]}),
    ("gqa", "hf_fp8kv.PrefixStore", {"prefix_store": "folder"}),
    ("gqa", "reuse_prefix=True", {"reuse_prefix": False}),
    ("hybrid", "a different kind", {}),
    ("sparse", "a different kind", {}),
    ("cross_attention", "encoder-decoder", {}),
]


@pytest.mark.parametrize(("name", "message", "keywords"), REFUSED, ids=str)
def test_caches_that_cannot_be_stored_are_refused(
    name: str, message: str, keywords: dict[str, Any], tmp_path: Path
) -> None:
    model, _ = tiny(name)
    with pytest.raises(ConfigError, match=message):
        enable(model, **{"prefix_store": PrefixStore(tmp_path), **keywords})


def test_passed_caches_use_the_store_or_are_refused(tmp_path: Path) -> None:
    """A refused cache is not changed."""
    reader, ids = Reader(tmp_path), words(40)
    for keywords in ({}, {"prefill": "stored", "config": None}):
        cache = FP8PagedCache(**{"config": reader.model.config, **keywords})
        with pytest.raises(ConfigError, match=r"make the cache with prefill|with a config"):
            reader.model.generate(ids, past_key_values=cache, **GREEDY)
        assert cache.host_length() == 0
    answer = reader.model.generate(ids, **GREEDY)
    loaded = FP8PagedCache.load(reader.new_cache().save(tmp_path / "cache"))
    assert_same(reader.model.generate(ids, past_key_values=loaded, **GREEDY), answer)
    assert loaded.restored_tokens == 32


def test_dynamic_rope_is_refused(tmp_path: Path) -> None:
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    model, _ = tiny("gqa", rope_parameters=dynamic)
    with pytest.raises(ConfigError, match="dynamic"):
        enable(model, prefix_store=PrefixStore(tmp_path))
    # The text config and each type of layers are also checked.
    options = FP8PagedCache(model.config, prefill="stored").options
    nested = LlavaConfig(text_config=model.config)
    by_type = copy.deepcopy(nested)
    by_type.text_config.rope_parameters = {
        "sliding_attention": {"rope_type": "default"},
        "": dynamic,
    }
    for config in (nested, by_type):
        with pytest.raises(ConfigError, match="dynamic"):
            check_store(PrefixStore(tmp_path), options, config)


def test_invalid_folders_and_bounds_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", "a\0b", None, 3):
        with pytest.raises(ConfigError, match="a folder"):
            PrefixStore(path)  # type: ignore[arg-type]
    for bound in (0, -1, 1.5, True, "1G"):
        with pytest.raises(ConfigError, match="max_bytes"):
            PrefixStore(tmp_path, max_bytes=bound)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["ein Ordner, größer", "link"])
def test_unusual_folder_paths(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths have spaces, are links, and are relative to a folder that the process has left."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    monkeypatch.chdir(tmp_path)
    reader = Reader(Path(name))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert reader.answer(words(40)) == 40
    assert len(files_of(tmp_path / name)) == 5
    assert pickle.loads(pickle.dumps(reader.store)).path == tmp_path / name
    assert Reader(tmp_path / name).answer(words(40)) == 8
    # Without the folder, there are no hits, but the answers are the same.
    shutil.rmtree((tmp_path / name).resolve())
    assert reader.answer(words(40)) == 40
    assert reader.answer(words(40)) == 40


def test_a_model_with_a_store_can_be_copied(tmp_path: Path) -> None:
    reader = Reader(tmp_path)
    reader.answer(words(40))
    reader.model.__class__ = reader.model.__class__.__base__
    for copied in (copy.deepcopy(reader.model), pickle.loads(pickle.dumps(reader.model))):
        cache = copied.generate(words(40), return_dict_in_generate=True, **GREEDY).past_key_values
        assert cache.restored_tokens == 32
    disable(reader.model)
    usage = reader.store.usage()
    reader.model.generate(words(40), **GREEDY)
    assert reader.store.usage() == usage
