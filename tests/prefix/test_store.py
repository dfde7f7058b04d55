"""Tests of pages in a folder, which are found only if everything that they depend on is equal."""

import copy
import errno
import fcntl
import functools
import io
import operator
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
from unittest import mock

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, ModelHook, add_hook_to_module
from torch.nn.modules.module import register_module_forward_hook
from transformers import LlavaConfig

from benchmarks.shared import make_environment
from hf_fp8kv import ConfigError, FP8PagedCache, KVScales, LayerScales, PrefixStore, enable
from hf_fp8kv.modeling.tensor_parallel import TensorParallel
from hf_fp8kv.prefix.file import StoredPage, serialize_page
from hf_fp8kv.prefix.stored_pages import check_store
from tests.helpers.assertions import assert_same
from tests.helpers.margins import require_wide_margins
from tests.helpers.tiny_models import build_variant
from tests.tools.store_kills import run_killed_writers

pytestmark = pytest.mark.text

PAGE_SIZE = 8
# Keywords of `StoreUser` that change the model's config. Other keywords are for the cache.
CONFIG_FIELDS = ("rope_parameters", "sliding_window", "seed")
GREEDY = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "suppress_tokens": [0]}
MIN_MARGIN = 1e-5
# A function that damages the file at the first path. The second path is a folder of another model.
Damage = Callable[[Path, Path], Any]


class StoreUser:
    """A new model with equal weights and a new store, as in a new process."""

    def __init__(self, folder: Path, name: str = "gqa", max_bytes: int = 1 << 30, **keywords: Any):
        fields = {key: keywords.pop(key) for key in list(keywords) if key in CONFIG_FIELDS}
        self.model, _ = build_variant(name, max_position_embeddings=512, **fields)
        self.store = PrefixStore(folder, max_bytes=max_bytes)
        self.keywords = {"page_size": PAGE_SIZE, **keywords}
        self.enable()

    def enable(self) -> None:
        enable(self.model, prefix_store=self.store, **self.keywords)

    def make_cache(self) -> FP8PagedCache:
        return FP8PagedCache(self.model, prefill="stored", **self.keywords)

    def check_answer(self, ids: torch.Tensor, **keywords: Any) -> int:
        """Compare an answer to the answer without a store. Return the number of computed tokens."""
        keywords = {**GREEDY, **keywords}
        output = self.model.generate(ids, return_dict_in_generate=True, **keywords)
        self.store.flush()
        num_prompts = len(ids) * keywords.get("num_beams", 1)
        num_computed = ids.shape[1] - output.past_key_values.restored_tokens // num_prompts
        if "num_beams" not in keywords:
            keywords["logits_processor"] = require_wide_margins(MIN_MARGIN)
        enable(self.model, prefill="stored", **self.keywords)
        expected = self.model.generate(ids, **keywords)
        self.enable()
        assert_same(output.sequences, expected, f"{num_computed} of {ids.shape[1]} tokens computed")
        return num_computed


@pytest.fixture
def user(tmp_path: Path) -> StoreUser:
    return StoreUser(tmp_path)


def make_ids(num_tokens: int, rows: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.randint(2, 98, (rows, num_tokens), generator=torch.Generator().manual_seed(seed))


def list_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def count_bytes(folder: Path) -> int:
    return sum(
        path.lstat().st_size
        for path in folder.iterdir()
        if path.name not in (".prefix_store.lock", "plans")
    )


@contextmanager
def hold_lock(folder: Path) -> Iterator[None]:
    with open(folder / ".prefix_store.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.mark.parametrize("name", ["gqa", "sliding_and_full", "latent"])
def test_a_new_process_computes_the_remaining_tokens(name: str, tmp_path: Path) -> None:
    prefix = make_ids(61)
    assert StoreUser(tmp_path, name).check_answer(torch.cat([prefix, make_ids(9, seed=1)], 1)) == 70
    for seed, num_new in enumerate((3, 11, 24)):
        user = StoreUser(tmp_path, name)
        ids = torch.cat([prefix, make_ids(num_new, seed=5 + seed)], 1)
        # 61 tokens fill seven pages and a part of the next page.
        assert user.check_answer(ids) == 61 + num_new - 56
        usage = user.store.usage()
        assert (usage.hits, usage.misses, usage.tokens_found) == (1, 0, 56)
    # The store has all tokens, but a call must compute at least the last token.
    for num_tokens, num_computed in ((57, 1), (56, 8), (8, 8)):
        assert user.check_answer(prefix[:, :num_tokens]) == num_computed
    # A page depends on all tokens up to its end.
    for index in (31, 8, 7, 0):
        changed_ids = prefix.clone()
        changed_ids[0, index] = 2 + (changed_ids[0, index] + 1) % 90
        assert user.check_answer(changed_ids) == 61 - index // PAGE_SIZE * PAGE_SIZE
        assert user.check_answer(changed_ids) == 61 - 56, "later pages were not stored"


def test_rows_of_a_batch_share_a_folder(tmp_path: Path) -> None:
    name = "sliding_and_full"
    ids = make_ids(49, rows=3)
    mask = torch.ones_like(ids)
    ids[1, :5] = mask[1, :5] = 0
    user = StoreUser(tmp_path, name)
    assert user.check_answer(ids[:, :45], attention_mask=mask[:, :45]) == 45
    user = StoreUser(tmp_path, name)
    assert user.check_answer(ids, attention_mask=mask) == 49 - 40
    # Two rows are exchanged. Then there is a single row, and then beams with the same prefix.
    order = torch.tensor([2, 1])
    assert user.check_answer(ids[order], attention_mask=mask[order]) == 49 - 48
    assert StoreUser(tmp_path, name).check_answer(ids[:1]) == 1
    assert StoreUser(tmp_path, name).check_answer(ids[2:], num_beams=3) == 1
    # A page is used only if all rows have it, and rows with different padding do not have it.
    assert user.check_answer(torch.cat([ids[:1], make_ids(49, seed=8)])) == 49
    mask[1, 5] = 0
    assert user.check_answer(ids[1:2], attention_mask=mask[1:2]) == 49


def test_a_recording_cache_restores_tokens_before_the_window(tmp_path: Path) -> None:
    user = StoreUser(tmp_path, "sliding")
    user.check_answer(make_ids(61))
    cache = user.make_cache()
    cache.activate_past_recording()
    user.model.generate(make_ids(61), past_key_values=cache, **GREEDY)
    assert cache.restored_tokens == 56
    cache.crop(20 - cache.get_seq_length())


def test_a_chat_stores_its_answers(tmp_path: Path) -> None:
    user = StoreUser(tmp_path, "gqa")
    cache = user.make_cache()
    ids = make_ids(20)
    for turn in range(3):
        answer = user.model.generate(ids, past_key_values=cache, **GREEDY)
        ids = torch.cat([answer, make_ids(8, seed=turn)], 1)
    assert cache.memory_footprint().reused_tokens == 24 + 37
    # The last prompt had 46 tokens, so the store has its five full pages.
    assert StoreUser(tmp_path, "gqa").check_answer(ids) == ids.shape[1] - 40


def make_scales(factor: float = 1.0, center: float = 0.1) -> KVScales:
    first_scale, second_scale, v_scale, k_center = (
        torch.full((2, 16), value) for value in (0.02, 0.03, 0.03 * factor, center)
    )
    layers = [LayerScales(scale, v_scale, k_center) for scale in (first_scale, second_scale)]
    return KVScales(dict(enumerate(layers)), "hf_fp8kv")


def test_changed_weights_find_no_pages(user: StoreUser) -> None:
    """No page is found if a single value of any weight changed, in place or in a new tensor."""
    ids = make_ids(30)
    assert user.check_answer(ids) == 30
    # Every third parameter, which includes all kinds in both layers.
    parameters = list(user.model.named_parameters())
    for number, (name, weight) in enumerate(parameters[::3]):
        weight.detach().view(-1)[37 * number % weight.numel()] += 0.01
        assert [user.check_answer(ids) for _ in range(2)] == [30, 6], name
    module = user.model.model.layers[1].mlp.up_proj
    module.weight = torch.nn.Parameter(module.weight * 1.0001)
    assert user.check_answer(ids) == 30
    # Merging an adapter writes to `.data`, which does not change the version of the tensor.
    module.weight.data += 0.001
    assert user.check_answer(ids) == 30


# A stand-in for the hook of PEFT that selects an adapter for each prompt.
_adapter_hook = types.FunctionType(
    (lambda _module, _args, _kwargs, *, adapter_names: None).__code__, {"__name__": "peft.hooks"}
)


def test_pages_of_other_adapters_are_not_found(user: StoreUser) -> None:
    ids = make_ids(30)
    for name in ("first", "second"):
        handle = user.model.model.layers[0].mlp.register_forward_pre_hook(
            partial(_adapter_hook, adapter_names=[name]), with_kwargs=True
        )
        assert [user.check_answer(ids) for _ in range(2)] == [30, 6], name
        handle.remove()
    assert user.check_answer(ids) == 30


def test_different_options_find_no_pages(tmp_path: Path) -> None:
    ids = make_ids(30)
    rope_parameters = {"rope_type": "default", "rope_theta": 9999.0}
    variants: list[dict[str, Any]] = [
        {}, {"dtype": "auto"}, {"dtype": "fp8"}, {"key_dtype": "fp8"}, {"value_dtype": "int8"},
        {"plan": ("fp8_e3m4 rotated", "fp8_e3m4")}, {"plan": ("fp8_e3m4", "fp8_e3m4 rotated")},
        {"page_size": 16}, {"scales": 0.05},
        {"scales": 0.06}, {"scales": make_scales()}, {"scales": make_scales(1.01)},
        {"scales": make_scales(center=0.11)},
        {"seed": 1}, {"rope_parameters": rope_parameters}, {"name": "sliding", "sliding_window": 8},
        {"name": "sliding", "sliding_window": 9}, {"backend": "torch"},
    ]  # fmt: skip
    users = [StoreUser(tmp_path, **variant) for variant in variants]
    assert [user.check_answer(ids) for user in users] == [30] * len(users)
    assert max(user.check_answer(ids) for user in users) < 30


def test_tokens_that_may_differ_from_the_prompt_are_not_stored(user: StoreUser) -> None:
    cache = user.make_cache()
    ids = make_ids(40)
    with torch.no_grad():
        # A direct call stores tokens that are not in the prompt.
        user.model(input_ids=make_ids(16, seed=9), past_key_values=cache)
    user.model.generate(ids, past_key_values=cache, **GREEDY)
    # Positions do not start at 0, or the model or a part of it is in training.
    user.model.generate(ids, position_ids=torch.arange(3, 43)[None], **GREEDY)
    # A new adapter may enable dropout in one module.
    for module in (user.model, user.model.model.layers[1].mlp):
        module.train()
        user.model.generate(ids, **GREEDY)
        user.model.eval()
    assert user.store.usage().files == 0
    assert user.check_answer(ids) == 40


def _scale_output(_module: Any, _args: Any, output: Any) -> Any:
    return output * 1.5


def _replace_forward(model: Any) -> None:
    module = model.model.layers[0].mlp
    forward = module.forward
    module.forward = functools.wraps(forward)(lambda states: forward(states) * 0.5)


def _replace_under_accelerate(model: Any) -> None:
    _replace_forward(model)
    add_hook_to_module(model.model.layers[0].mlp, AlignDevicesHook("cpu"))


class _ScaleOutput(ModelHook):
    def post_forward(self, module: Any, output: Any) -> Any:
        return _scale_output(module, None, output)


def _add_tokens(model: Any, prepare_inputs: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Prepend embeddings of two tokens to the prompt, like prompt tuning in PEFT."""
    inputs = prepare_inputs(*args, **kwargs) | {"position_ids": None}
    if kwargs.get("is_first_iteration"):
        embeds = model.get_input_embeddings()(inputs.pop("input_ids"))
        inputs["inputs_embeds"] = torch.cat([embeds[:, :2] * 2, embeds], 1)
    return inputs


def _add_tokens_in_method(model: Any, package: str = __name__) -> None:
    prepare_inputs = type(model).prepare_inputs_for_generation.__get__(model)
    code = types.FunctionType(_add_tokens.__code__, {"__name__": package, "torch": torch})
    model.prepare_inputs_for_generation = partial(code, model, prepare_inputs)


def _add_tokens_in_class(model: Any) -> None:
    prepare_inputs = type(model).prepare_inputs_for_generation

    def prepare(model: Any, *args: Any, **kwargs: Any) -> Any:
        return _add_tokens(model, prepare_inputs.__get__(model), *args, **kwargs)

    members = {"prepare_inputs_for_generation": prepare, "__qualname__": type(model).__qualname__}
    model.__class__ = type("Tuned", (type(model),), members)


CODE_CHANGES: dict[str, Callable[[Any], Any]] = {
    "a hook": lambda model: model.model.layers[0].mlp.register_forward_hook(_scale_output),
    "a pre-hook": lambda model: model.model.norm.register_forward_pre_hook(lambda *_: None),
    "a hook of all modules": lambda _: register_module_forward_hook(lambda *_: None),
    "a forward": _replace_forward,
    "a forward under accelerate": _replace_under_accelerate,
    "a hook in accelerate": lambda model: add_hook_to_module(
        model.model.layers[0].mlp, _ScaleOutput()
    ),
    "more tokens": _add_tokens_in_method,
    "more tokens by PEFT": partial(_add_tokens_in_method, package="peft.peft_model"),
}


@pytest.mark.parametrize("change", CODE_CHANGES.values(), ids=CODE_CHANGES.keys())
def test_code_that_may_change_hidden_states_disables_the_store(
    change: Callable[[Any], Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert StoreUser(tmp_path / "clean").check_answer(make_ids(40)) == 40
    user = StoreUser(tmp_path / "tuned", dtype="fp8")
    handle = change(user.model)
    for folder in ("tuned", "clean"):
        user.store = PrefixStore(tmp_path / folder)
        user.enable()
        files = list_files(tmp_path / folder)
        for _ in range(2):
            user.model.generate(make_ids(40), **GREEDY)
        user.store.flush()
        usage = user.store.usage()
        assert (usage.hits, usage.misses, list_files(tmp_path / folder)) == (0, 0, files)
    if hasattr(handle, "remove"):
        handle.remove()
    assert any("prefix_store: expected" in message for message in caplog.messages)


@pytest.mark.parametrize("weight", [torch.empty(0), torch.empty(2, device="meta")])
def test_weights_outside_this_process_are_refused(weight: torch.Tensor, user: StoreUser) -> None:
    """accelerate may offload weights, and DeepSpeed may store weights in other processes."""
    user.model.model.layers[1].mlp.up_proj.weight = torch.nn.Parameter(weight)
    with pytest.raises(ConfigError, match="expected all weights in this process"):
        user.enable()


def test_tokens_added_by_a_model_are_not_stored(user: StoreUser, tmp_path: Path) -> None:
    _add_tokens_in_class(user.model)
    cache = user.make_cache()
    answer = user.model.generate(make_ids(40), past_key_values=cache, **GREEDY)
    user.store.flush()
    assert not list_files(tmp_path)
    repeated_answer = user.model.generate(make_ids(40), past_key_values=cache, **GREEDY)
    assert_same(repeated_answer, answer, "the cache has more tokens than the prompt")


@pytest.mark.parametrize("is_training", [False, True], ids=["weights", "training"])
def test_a_model_may_change_during_a_chat(is_training: bool, user: StoreUser) -> None:
    cache = user.make_cache()
    user.model.train(is_training)
    answer = user.model.generate(make_ids(40), past_key_values=cache, **GREEDY)
    user.model.eval()
    if not is_training:
        user.model.model.layers[0].mlp.up_proj.weight.data.mul_(1.1)
    extended = torch.cat([answer, make_ids(5)], 1)
    for num_reused in (0, extended.shape[1] - 1):
        user.model.generate(extended, past_key_values=cache, **GREEDY)
        assert cache.reused_tokens == num_reused
    assert user.check_answer(extended) == extended.shape[1] - 48


def _accept_page(_page: StoredPage) -> None:
    """Accept every page."""


def edit_row(change: Callable[[torch.Tensor], list[torch.Tensor]]) -> Callable[[Any, Any], Any]:
    def edit(rows: list[torch.Tensor], metadata: Any) -> Any:
        rows.extend(change(rows.pop()))
        return metadata

    return edit


def edit_layer(**fields: Any) -> Callable[[Any, Any], Any]:
    return lambda _, metadata: [metadata[0], metadata[1] | fields, *metadata[2:]]


# Functions from the rows and metadata of a page to invalid metadata, for each rule. The changed
# files are intact and have valid names, as an attacker can write them.
FORGERIES: list[Callable[[Any, Any], Any]] = [
    lambda _, metadata: None,
    lambda _, metadata: metadata[:1],
    lambda _, metadata: [metadata[0], {}],
    edit_layer(dtypes=["load", "save"]), edit_layer(dtypes=["int64", 3]), edit_layer(dtypes=None),
    edit_layer(shape=[2**40, 0, 0]), edit_layer(shape=[-2, 16, 16]), edit_layer(shape=["2", 1, 1]),
    edit_layer(shape=[2**31 - 1] * 3), edit_layer(index=0),
    edit_row(lambda row: [row[None]]), edit_row(lambda row: [row.view(torch.int8)]),
    edit_row(lambda row: [torch.cat([row, row])]), edit_row(lambda row: []),
    edit_row(lambda row: [row, row.clone()]),
]  # fmt: skip


def forge(change: Callable[[Any, Any], Any]) -> Damage:
    """Return a function that changes the contents of a page, and writes an intact file."""

    def damage(path: Path, _: Path) -> None:
        (page,) = PrefixStore(path.parent).read([path.stem], _accept_page)
        rows = list(page.rows)
        changed_page = StoredPage(rows, change(rows, copy.deepcopy(page.metadata)))
        path.write_bytes(serialize_page(path.stem, changed_page))

    return damage


def rewrite_file(change: Callable[[bytes], bytes]) -> Damage:
    return lambda path, _: path.write_bytes(change(path.read_bytes()))


def replace_by_link(target: str) -> Damage:
    return lambda path, folder: (path.unlink(), path.symlink_to(folder / target or path))


def flip_bit(index: int) -> Damage:
    def flip(contents: bytes) -> bytes:
        return contents[:index] + bytes([contents[index] ^ 1]) + contents[index + 1 :]

    return rewrite_file(flip)


DAMAGES: list[Damage] = [
    *(rewrite_file(operator.itemgetter(slice(size))) for size in (0, 300, -1)),
    *map(flip_bit, (0, 60, -40)),  # in the length of the header, in the header, and in the data
    *map(forge, FORGERIES),
    # A page of another model, and another page of this model.
    lambda path, outside: shutil.copy(list_files(outside)[0], path),
    lambda path, _: shutil.copy(
        next(other for other in list_files(path.parent) if other != path), path
    ),
    *map(replace_by_link, ("good", "none", "")),
    lambda path, _: (path.unlink(), os.mkfifo(path)),
    # A header length of 2**62, a different format, additional bytes, and a header of brackets.
    rewrite_file(lambda contents: (1 << 62).to_bytes(8, "little") + contents[8:]),
    rewrite_file(lambda contents: pickle.dumps({"k": contents})),
    rewrite_file(lambda contents: contents + b"\0"),
    rewrite_file(lambda _: (20_000).to_bytes(8, "little") + b"[" * 20_000),
]


def list_keys(folder: Path) -> list[str]:
    return [
        path.stem for path in sorted(list_files(folder), key=lambda path: -path.stat().st_mtime_ns)
    ]


def test_invalid_files_are_recomputed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "store"
    other_folder = tmp_path / "other"
    ids = make_ids(40)
    StoreUser(folder, "sliding").check_answer(ids)
    StoreUser(other_folder, "sliding", dtype="fp8").check_answer(ids)
    shutil.copy(folder / f"{list_keys(folder)[0]}.safetensors", other_folder / "good")
    user = StoreUser(folder, "sliding")
    for case, damage in enumerate(DAMAGES):
        index = case % 4
        path = folder / f"{list_keys(folder)[index]}.safetensors"
        damage(path, other_folder)
        caplog.clear()
        assert user.check_answer(ids, max_new_tokens=1) == 40 - PAGE_SIZE * index, case
        assert sum("is not a page" in message for message in caplog.messages) == 1, case
        assert user.check_answer(ids, max_new_tokens=1) == 8, case
        assert not path.is_symlink()
        assert list(user.store.read([path.stem], _accept_page)), "the page was not stored again"
    assert user.store.usage().files == 5


def _set_sizes(num_heads: int, dim: int, dtype: str) -> Callable[[Any, Any], Any]:
    """Return a function that gives a page the sizes of another model with the same layers."""

    def change(rows: list[torch.Tensor], metadata: Any) -> Any:
        for index, layer_metadata in enumerate(metadata):
            # Codes of K and V of 2 heads of 16 channels, without or with two scales of 2 bytes.
            scale_bytes = 4 if len(rows[index]) > 2 * PAGE_SIZE * 2 * 16 else 0
            layer_metadata.update(shape=[num_heads, dim, dim], dtypes=[dtype] * 2)
            num_bytes = num_heads * PAGE_SIZE * (2 * dim + scale_bytes)
            rows[index] = torch.ones(num_bytes, dtype=torch.uint8)
        return metadata

    return change


# Each wrong size occurs with one storage option, because sizes are checked first.
@pytest.mark.parametrize(
    ("sizes", "keywords"),
    [
        ((3, 16, "float32"), {}), ((2, 8, "float32"), {"scales": make_scales()}),
        ((2, 16, "float16"), {"offloading": True}), ((1 << 40, 0, "float32"), {"scales": 0.05}),
    ],
    ids=str,
)  # fmt: skip
def test_pages_of_a_different_model_are_refused(
    sizes: tuple[int, int, str], keywords: dict[str, Any], tmp_path: Path
) -> None:
    """The sizes of a model are unknown until its first layer has computed."""
    ids = make_ids(40, rows=2)
    StoreUser(tmp_path, **keywords).check_answer(ids)
    for path in list_files(tmp_path):
        forge(_set_sizes(*sizes))(path, tmp_path)
    user = StoreUser(tmp_path, **keywords)
    cache = user.make_cache()
    user.model.generate(ids, past_key_values=cache, **GREEDY)
    # With static scales, the number of heads is known, so the first page is refused at once.
    num_refused = 1 if "scales" in keywords else 8
    assert (cache.restored_tokens, user.store.usage().files_refused) == (0, num_refused)
    for options in ({}, {"prefill_chunk_size": 7}):
        user.check_answer(ids, **options)
    # A call refuses one page before its use, and the next call refuses the next page.
    assert [user.check_answer(ids) for _ in range(9)][-1] == 8, "some pages were not stored again"


def test_a_different_process_may_store_the_pages_first(tmp_path: Path) -> None:
    stores = [PrefixStore(tmp_path) for _ in range(2)]
    pages = [StoredPage([make_row(3)], {})]

    def copy_pages(_: list[int]) -> list[StoredPage]:
        stores[1].write(["a" * 64], lambda _: pages)
        stores[1].flush()
        return pages

    stores[0].write(["a" * 64], copy_pages)
    assert [store.usage().bytes_written for store in stores] == [0, count_bytes(tmp_path)]


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(errno.EACCES, "Permission denied"), "Permission denied"),
        (MemoryError(), "MemoryError"),
    ],
)
def test_an_unreadable_file_is_kept(
    error: Exception, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """The file may be intact, so it is ignored, and kept for processes that can read it."""
    StoreUser(tmp_path).check_answer(make_ids(40))
    user = StoreUser(tmp_path)
    os_open = os.open

    def refuse(path: Any, *args: Any, **kwargs: Any) -> int:
        if str(path).endswith(".safetensors"):
            raise error
        return os_open(path, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        assert [user.check_answer(make_ids(40)) for _ in range(2)] == [40, 40]
    assert [message in record.message for record in caplog.records] == [True]
    assert StoreUser(tmp_path).check_answer(make_ids(40)) == 8


def test_the_least_recently_used_pages_are_removed(tmp_path: Path) -> None:
    StoreUser(tmp_path).check_answer(make_ids(40))
    page_bytes = list_files(tmp_path)[0].stat().st_size
    user = StoreUser(tmp_path, max_bytes=13 * page_bytes)
    for seed in range(1, 4):
        user.check_answer(make_ids(40, seed=seed))
        user.check_answer(make_ids(40))  # used after each prompt
        assert count_bytes(tmp_path) <= 13 * page_bytes
    assert [user.check_answer(make_ids(40, seed=seed)) for seed in (0, 3, 1)] == [8, 8, 40]
    # The store keeps the first pages of a prompt that does not fit.
    user = StoreUser(tmp_path, max_bytes=3 * page_bytes)
    assert [user.check_answer(make_ids(90, seed=20)) for _ in range(2)] == [90, 90 - 24]


@pytest.mark.parametrize("is_windows", [False, True])
def test_a_store_that_cannot_write_still_reads(
    is_windows: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    StoreUser(tmp_path).check_answer(make_ids(40))
    user = StoreUser(tmp_path)

    def refuse_links(*_: Any, **keywords: Any) -> None:
        if not keywords.get("follow_symlinks", True):
            raise NotImplementedError("utime: follow_symlinks unavailable on this platform")

    class FileOnFullDisk(io.FileIO):
        def write(self, contents: Any) -> int:
            super().write(contents[:100])
            raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        if is_windows:
            patch.setitem(sys.modules, "fcntl", None)
            patch.setattr(os, "utime", refuse_links)
        else:
            patch.setattr(Path, "open", FileOnFullDisk)
        assert [user.check_answer(make_ids(40, seed=seed)) for seed in (1, 2, 0)] == [40, 40, 8]
    assert sum("stores nothing" in message for message in caplog.messages) == 1
    assert not list(tmp_path.glob(".*.part"))
    assert len(list_files(tmp_path)) == 5


@pytest.mark.parametrize("error", [MemoryError, torch.OutOfMemoryError])
def test_a_copy_without_memory_is_not_stored(
    error: type[Exception], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = PrefixStore(tmp_path)
    store.write(["a" * 64], mock.Mock(side_effect=error("CUDA out of memory")))
    assert "no memory for a copy" in caplog.text
    store_pages(store, 3)
    assert store.usage().files == 3, "only pages with free memory are stored"


def test_pages_queued_for_writing_are_found(
    user: StoreUser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hf_fp8kv.prefix.store._LOCK_SECONDS", 60.0)
    with hold_lock(tmp_path):
        answers = [user.model.generate(make_ids(40), **GREEDY) for _ in range(2)]
        assert not list_files(tmp_path)
    assert_same(*answers)
    counts = user.store.counts()
    assert (counts["hits"], counts["bytes_read"]) == (1, 0)
    assert user.store.usage().files == 5


def store_pages(store: PrefixStore, num_pages: int, seed: int = 0) -> list[str]:
    keys = [f"{seed:032x}{number:032x}" for number in range(num_pages)]
    store.write(keys, lambda indices: [StoredPage([make_row(n)], {"index": n}) for n in indices])
    return keys


def make_row(index: int) -> torch.Tensor:
    return torch.full((12,), index % 256, dtype=torch.uint8)


def run_script(script: str, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *options, "-c", script, str(folder)],
        env=make_environment(), capture_output=True, text=True,
    )  # fmt: skip


IMPORTS = """
import atexit, fcntl, os, signal, sys, threading, time
from hf_fp8kv import PrefixStore
from hf_fp8kv.prefix import store as store_module
from tests.prefix.test_store import _accept_page, list_files, store_pages
"""


def test_an_interrupted_flush_is_repeated_at_the_end(tmp_path: Path) -> None:
    """After an interrupt, `flush` may be called again, and is called when the process ends.

    After the main thread ends, the interpreter either starts no thread or does not wait for it.
    """
    script = f"""{IMPORTS}
# A process that starts in the background ignores SIGINT.
signal.signal(signal.SIGINT, signal.default_int_handler)
store_module._LOCK_SECONDS = 60
store = PrefixStore(sys.argv[1])
lock = os.open(store.path / '.prefix_store.lock', os.O_CREAT | os.O_RDWR)
def store_late():
    while threading.main_thread().is_alive():
        time.sleep(0.01)
    store_pages(store, 60, 2)
    store.flush()
    print(len([*store.read(keys, _accept_page)]))
for seed in range(2):
    fcntl.flock(lock, fcntl.LOCK_EX)
    keys = store_pages(store, 20, seed)
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        store.flush()
        sys.exit('was not interrupted')
    except KeyboardInterrupt:
        fcntl.flock(lock, fcntl.LOCK_UN)
    if not seed:
        store.flush()
        assert len(list_files(store.path)) == 20
atexit.register(store_late)
sys.exit(3)
"""
    process = run_script(script, tmp_path)
    assert (process.returncode, process.stdout, process.stderr) == (3, "20\n", "")
    assert len(list_files(tmp_path)) == 100


@pytest.mark.parametrize(
    ("error", "message"),
    [(ZeroDivisionError, "ZeroDivisionError"), (MemoryError, "no memory for a copy")],
)
def test_an_error_with_one_prompt_does_not_affect_other_prompts(
    error: type[Exception], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    store = PrefixStore(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", mock.Mock(side_effect=error))
        store_pages(store, 3)
        store.flush()
    assert message in caplog.text
    store_pages(store, 3, 1)
    assert store.usage().files == 3


def test_a_write_waits_if_too_many_bytes_are_queued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hf_fp8kv.prefix.store._MAX_QUEUED_BYTES", 50 * 12)
    store = PrefixStore(tmp_path)
    for seed in range(20):
        store_pages(store, 20, seed)
        assert len(list_files(tmp_path)) >= 20 * (seed + 1) - 70
    store.flush()
    assert len(list_files(tmp_path)) == 400


@pytest.mark.parametrize("missing_index", [0, 7, 50])
def test_pages_are_read_in_order(
    missing_index: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hf_fp8kv.prefix.store.NUM_READERS", 3)
    store = PrefixStore(tmp_path)
    keys = store_pages(store, missing_index)
    store.flush()
    requested_keys = iter([*keys, *["b" * 64] * 9])
    pages = list(PrefixStore(tmp_path).read(requested_keys, _accept_page))
    assert [page.metadata["index"] for page in pages] == list(range(missing_index))
    for index, page in enumerate(pages):
        assert torch.equal(page.rows[0], make_row(index))
    assert len(list(requested_keys)) >= 9 - 3, "too many keys were looked up"


@pytest.mark.parametrize("num_allowed", [0, 2])
def test_pages_are_written_and_read_if_no_thread_starts(
    num_allowed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    effects = [mock.DEFAULT] * num_allowed + [RuntimeError("can't start new thread")] * 99
    start_or_fail = mock.Mock(side_effect=effects, wraps=threading.Thread.start)
    monkeypatch.setattr(threading.Thread, "start", lambda thread: start_or_fail(thread))
    store = PrefixStore(tmp_path)
    keys = store_pages(store, 20)
    assert num_allowed or len(list_files(tmp_path)) == 20, "pages were not written at once"
    store.flush()
    pages = PrefixStore(tmp_path).read(keys, _accept_page)
    assert [page.metadata["index"] for page in pages] == list(range(20))


def test_a_slow_writer_delays_only_once(
    user: StoreUser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hf_fp8kv.prefix.store._LOCK_SECONDS", 0.05)
    monkeypatch.setattr("hf_fp8kv.prefix.store._SHORT_LOCK_SECONDS", 0.0)
    with hold_lock(tmp_path):
        assert user.check_answer(make_ids(40)) == 40
        assert not list_files(tmp_path)
        monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("waited again"))
        assert user.check_answer(make_ids(40)) == 40
    assert user.check_answer(make_ids(40)) == 40
    assert len(list_files(tmp_path)) == 5


@pytest.mark.full
def test_a_forked_process_can_store_pages(tmp_path: Path) -> None:
    script = f"""{IMPORTS}
store = PrefixStore(sys.argv[1])
lock = os.open(store.path / '.prefix_store.lock', os.O_CREAT | os.O_RDWR)
fcntl.flock(lock, fcntl.LOCK_EX)
keys = store_pages(store, 3)
child = os.fork()
fcntl.flock(lock, fcntl.LOCK_UN)
if not child:
    signal.alarm(60)
    store_pages(store, 3, 1)
    store.flush()
    os._exit(store.usage().files < 3)
sys.exit(os.waitpid(child, 0)[1] != 0)
"""
    assert run_script(script, tmp_path, "-W", "ignore").returncode == 0
    assert len(list_files(tmp_path)) == 6


def test_foreign_files_are_kept_and_unfinished_files_removed(tmp_path: Path) -> None:
    foreign_names = ["README", "film.part", ".lock", "model.safetensors"]
    for name in foreign_names:
        (tmp_path / name).write_bytes(b"x" * 5000)
    (tmp_path / "folder.part").mkdir()
    (tmp_path / f".{64 * chr(97)}.safetensors.7-0a.part").write_text("of a killed process")
    (tmp_path / f".{64 * chr(98)}.safetensors.7-0a.part").symlink_to(tmp_path / "README")
    StoreUser(tmp_path, max_bytes=1000).check_answer(make_ids(40))
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {*foreign_names, "folder.part", ".prefix_store.lock", "plans"}
    assert {(tmp_path / name).stat().st_size for name in foreign_names} == {5000}


@pytest.mark.full
def test_killed_writers_leave_valid_files() -> None:
    counts = run_killed_writers(num_kills=40)
    assert (counts["wrong_answers"], counts["over_limit"]) == (0, 0), counts
    assert counts["bytes_written"] > 0
    assert counts["tokens_found"] > 0


@pytest.mark.parametrize(
    ("name", "message", "keywords"),
    [
        ("gqa", "prefill='stored'", {"prefill": "exact"}),
        ("gqa", "max_cache_len", {"max_cache_len": 64}),
        ("gqa", "a tensor-parallel model", {"tensor_parallel": TensorParallel(0, 2)}),
        ("gqa", "layers of other kinds", {"skip_layers": [0]}),
        ("gqa", "hf_fp8kv.PrefixStore", {"prefix_store": "folder"}),
        ("gqa", "got reuse_prefix=False. Leave", {"reuse_prefix": False}),
        ("cross_attention", "encoder-decoder", {}),
    ],
    ids=str,
)
def test_caches_that_cannot_be_stored_are_refused(
    name: str, message: str, keywords: dict[str, Any], tmp_path: Path
) -> None:
    model, _ = build_variant(name)
    with pytest.raises(ConfigError, match=message):
        enable(model, **{"prefix_store": PrefixStore(tmp_path), **keywords})


def test_caches_of_the_caller_use_the_store_or_are_refused(user: StoreUser, tmp_path: Path) -> None:
    ids = make_ids(40)
    for keywords in ({}, {"prefill": "stored", "config": None}):
        cache = FP8PagedCache(**{"config": user.model, **keywords})
        with pytest.raises(ConfigError, match=r"Make the cache with prefill|with a config"):
            user.model.generate(ids, past_key_values=cache, **GREEDY)
        assert cache.host_length() == 0
    answer = user.model.generate(ids, **GREEDY)
    loaded = FP8PagedCache.load(user.make_cache().save(tmp_path / "cache"))
    assert_same(user.model.generate(ids, past_key_values=loaded, **GREEDY), answer)
    assert loaded.restored_tokens == 32


def test_dynamic_rope_is_refused(tmp_path: Path) -> None:
    """The RoPE of each type of layers in the config of the text model is checked."""
    model, _ = build_variant("gqa")
    options = FP8PagedCache(model, prefill="stored").options
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    nested_rope = {"sliding_attention": {"rope_type": "default"}, "": rope}
    llava_config = LlavaConfig(text_config=model.config)
    for config, parameters in ((model.config, rope), (llava_config, nested_rope)):
        config.get_text_config().rope_parameters = parameters
        with pytest.raises(ConfigError, match="dynamic"):
            check_store(PrefixStore(tmp_path), options, config)


@pytest.mark.parametrize(
    ("path", "max_bytes", "message"),
    [("file", 1, "a folder"), ("a\0b", 1, "a folder"), (3, 1, "a folder"),
     (".", 0, "max_bytes"), (".", "1G", "max_bytes")],
)  # fmt: skip
def test_invalid_folders_and_limits_are_refused(
    path: Any, max_bytes: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    with pytest.raises(ConfigError, match=message):
        PrefixStore(path, max_bytes=max_bytes)


def test_folder_paths_may_be_unusual(tmp_path: Path, monkeypatch: Any) -> None:
    """A path may be a link with spaces, and relative to an earlier working directory."""
    (tmp_path / "real").mkdir()
    name = "ein Link, größer"
    (tmp_path / name).symlink_to(tmp_path / "real")
    monkeypatch.chdir(tmp_path)
    user = StoreUser(Path(name))
    monkeypatch.chdir("/")
    assert [user.check_answer(make_ids(40)) for _ in range(2)] == [40, 8]
    assert len(list_files(tmp_path / name)) == 5
    assert pickle.loads(pickle.dumps(user.store)).path == tmp_path / name
    # If the folder is removed, there are no hits, but the answers are the same.
    shutil.rmtree(tmp_path / "real")
    assert [user.check_answer(make_ids(40)) for _ in range(2)] == [40, 40]
