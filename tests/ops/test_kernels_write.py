"""Compare the bits that Triton's write and gather kernels store and return with the reference.

The tests run on a GPU if there is one, otherwise in Triton's interpreter. Memory is random before
it is written, and the first and the last page are in no table.
"""

import dataclasses
import math

import pytest
import torch

from hf_fp8kv import ops
from hf_fp8kv.formats import AUTO, FORMATS, codec
from hf_fp8kv.ops import Pages, reference
from hf_fp8kv.ops.blocks import locate_pages
from hf_fp8kv.ops.page_layout import pack_codes
from tests.helpers.assertions import assert_same
from tests.helpers.blocks import split_into_blocks
from tests.helpers.grids import pairwise
from tests.ops import test_ops
from tests.ops.test_ops import (
    ALL_NAMES,
    FORMAT_NAMES,
    NEXT_FORMAT,
    assert_same_pages,
    make_pages,
    make_vectors,
    map_pages,
    to_comparable_bytes,
)

if ops.explain_backends()["triton"] is not None:
    pytest.skip(str(ops.explain_backends()["triton"]), allow_module_level=True)

import triton
import triton.language as tl

from hf_fp8kv.ops.triton import encoder
from hf_fp8kv.ops.triton.gather import gather
from hf_fp8kv.ops.triton.tuning import MAX_DECODE_TOKENS
from hf_fp8kv.ops.triton.write import TILE_TOKENS, UNLIMITED, write

pytestmark = pytest.mark.usefixtures("interpreted", "poisoned_outputs")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
Tensor = torch.Tensor


@dataclasses.dataclass(frozen=True)
class Case(test_ops.Case):
    """One call: its tokens, pages and formats. `lengths` are the lengths before the call."""

    name: str = ""
    lengths: tuple[int, ...] = (5, 0, 30)
    dtype: torch.dtype = torch.bfloat16
    limit: int = UNLIMITED
    num_freed_pages: int = 0  # at the start of every table
    num_extra_columns: int = 0  # columns that no token needs, negative if columns are missing
    in_blocks: bool = False  # several blocks of memory instead of one

    @property
    def stop(self) -> int:
        return max(self.lengths) + self.num_tokens

    def __str__(self) -> str:
        changed_fields = (
            f"{field.name}={getattr(self, field.name)}"
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        )
        return ",".join(changed_fields).replace("torch.", "") or "default"


def make_noise_pages(case: Case) -> Pages:
    """Return pages with random bytes. The first and the last page are not in any table."""
    pages = make_pages(case)
    for region in pages.regions.values():
        region.view(torch.uint8).random_(256)
    num_columns = -(-case.stop // case.page_size) + case.num_extra_columns
    shape = len(case.lengths), num_columns
    inner_pages = 1 + torch.randperm(len(pages.block) - 2)
    table = inner_pages[: math.prod(shape)].view(shape).int()
    table[:, : case.num_freed_pages] = -1
    return pages._replace(table=table)


def make_tokens(case: Case) -> tuple[Tensor, Tensor]:
    """Return new keys and values, in the memory order of a model's projections."""
    shape = (len(case.lengths), case.num_tokens, case.num_heads)
    key, value = torch.randn(*shape, case.k_dim), torch.randn(*shape, case.v_dim)
    return (3 * key).to(case.dtype).transpose(1, 2), value.to(case.dtype).transpose(1, 2)


def copy_to_device(pages: Pages) -> Pages:
    return map_pages(lambda tensor: tensor.to(DEVICE, copy=True), pages)


def make_lengths(case: Case) -> Tensor:
    return torch.tensor(case.lengths, dtype=torch.int32, device=DEVICE)


def compute_expected(case: Case, pages: Pages, key: Tensor, value: Tensor) -> Pages:
    """Return the pages after the write, computed token by token."""
    new_pages = map_pages(torch.clone, pages)
    regions = new_pages.regions
    k, k_scales = reference.quantize(key, pages.k, search=True)
    v, v_scales = reference.quantize(value, pages.v, search=False)
    for row, length in enumerate(case.lengths):
        for token in range(case.num_tokens):
            column, slot = divmod(length + token, case.page_size)
            page = pages.table[row, column] if column < pages.table.shape[1] else -1
            if length + token >= case.limit or page < 0:
                continue
            regions["k"][page, :, slot] = pack_codes(k[row, :, token], pages.k_dtype)
            regions["v"][page, :, :, slot] = pack_codes(v[row, :, token], pages.v_dtype)
            for side_index, scales in enumerate((k_scales, v_scales)):
                if scales is not None:
                    regions["token_scales"][page, :, slot, side_index] = scales[row, :, token]
    return new_pages


def check_write(case: Case, key: Tensor | None = None, value: Tensor | None = None) -> None:
    if key is None or value is None:
        key, value = make_tokens(case)
    pages = make_noise_pages(case)
    actual = split_into_blocks(pages, device=DEVICE) if case.in_blocks else copy_to_device(pages)
    # Kernels also accept a table that is part of a wider table.
    num_columns = actual.table.shape[1]
    wide_table = torch.nn.functional.pad(actual.table, (0, 3), value=1 << 30)
    actual = actual._replace(table=wide_table[:, :num_columns])
    new_lengths = make_lengths(case) + case.num_tokens
    write(actual, key.to(DEVICE), value.to(DEVICE), new_lengths, case.limit)
    actual = map_pages(torch.Tensor.cpu, actual)
    assert_same_pages(actual, compute_expected(case, pages, key, value))


SCALES = {
    "dynamic": {},
    "static": {"dynamic": False},
    "centered": {"center": True},
    "rotated": {"center": True, "rotated": True},
}
SHAPES = {
    "decode": {"lengths": (5, 15, 16)},
    "tiles": {"lengths": (5, 32), "num_tokens": TILE_TOKENS + 1, "page_size": 64},
    "tiles that pages cut": {"lengths": (5, 32), "num_tokens": 20, "page_size": 6, "num_heads": 1},
    "blocks": {"lengths": (63, 64, 65), "num_tokens": 3, "page_size": 32, "in_blocks": True},
}


# Each format runs with each kind of scale and each shape.
@pytest.mark.parametrize(
    ("name", "scales", "shape"),
    pairwise(
        ALL_NAMES, list(SCALES), list(SHAPES),
    ),
)  # fmt: skip
def test_each_format_is_written_with_each_kind_of_scale(name, scales, shape):
    check_write(Case(k_format=name, v_format=NEXT_FORMAT[name], **SCALES[scales], **SHAPES[shape]))


@pytest.mark.parametrize("num_tokens", [1, 2, MAX_DECODE_TOKENS, MAX_DECODE_TOKENS + 1, 16, 17])
def test_tokens_around_the_end_of_a_page_are_written(num_tokens):
    check_write(Case(lengths=(0, 15, 16, 17), num_tokens=num_tokens, num_heads=1, k_dim=8, v_dim=8))


# Single tokens and tiles use two kernels. The head size determines the vectors of a token's
# values. The page size determines the parts of a tile.
@pytest.mark.parametrize(
    ("dims", "page_size", "scales", "dtype", "num_tokens"),
    pairwise(
        [(1, 1), (3, 5), (33, 80), (80, 96), (256, 128), (576, 512)],
        [1, 12, 48, 128],
        list(SCALES),
        [torch.float64, torch.float32, torch.float16, torch.bfloat16],
        [1, TILE_TOKENS + 5],
    ),
    ids=str,
)
def test_any_sizes_and_dtypes_are_written(dims, page_size, scales, dtype, num_tokens):
    """The dtype of stored values also varies. The last token contains an infinity and a NaN."""
    case = Case(
        lengths=(70,), num_tokens=num_tokens, num_heads=1, k_dim=dims[0], v_dim=dims[1],
        page_size=page_size, dtype=dtype, k_format="int8", v_format="fp8_e2m5", **SCALES[scales],
    )  # fmt: skip
    key, value = make_tokens(case)
    key[0, 0, -1, dims[0] // 3] = math.inf
    value[0, 0, -1, dims[1] // 2] = math.nan
    check_write(case, key, value)
    check_write(dataclasses.replace(case, k_format=AUTO, v_format=AUTO))


@pytest.mark.parametrize("num_tokens", [1, 12])
def test_inputs_may_have_any_strides(num_tokens):
    case = Case(lengths=(9, 3), num_tokens=num_tokens, k_dim=24, v_dim=48, page_size=64)
    fused = torch.randn(2, num_tokens, 2, 200).transpose(1, 2)
    check_write(case, fused[..., :24], fused[..., 24:72])
    channels_first = torch.randn(24, 2, num_tokens, 2).permute(1, 3, 2, 0)
    check_write(case, channels_first, fused[..., 4:196:4])
    expanded_key = torch.randn(24).expand(*fused.shape[:3], -1)
    check_write(case, expanded_key, fused[..., :1].expand(-1, -1, -1, 48))


MISSING_PAGES = {
    "limit": {"limit": 41},
    "no room": {"limit": 0},
    "freed pages": {"num_freed_pages": 3},
    "short table": {"num_extra_columns": -1},
}


# Missing pages determine which tokens are skipped. The number of tokens determines the kernel.
@pytest.mark.parametrize(
    ("name", "page_size", "num_tokens"), pairwise(list(MISSING_PAGES), [6, 16], [1, 3, 40])
)
def test_tokens_without_a_page_or_past_the_limit_are_not_stored(name, page_size, num_tokens):
    case = Case(
        lengths=(18, 39), num_tokens=num_tokens, num_heads=1, page_size=page_size, k_dim=8, v_dim=8,
        **MISSING_PAGES[name],
    )  # fmt: skip
    check_write(case)
    check_write(dataclasses.replace(case, num_tokens=0))


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_values_of_all_kinds_are_written(name):
    """Values are stored in consecutive tiles of tokens, and each token by a separate program."""
    vectors = make_vectors(32)
    tiled_case = Case(
        lengths=(0,), num_tokens=len(vectors), num_heads=1, k_dim=32, v_dim=32, page_size=32,
        dtype=torch.float32, k_format=name, v_format=name,
    )  # fmt: skip
    states = vectors[None, None]
    check_write(tiled_case, states, states)
    few = vectors[::4]
    single_case = dataclasses.replace(tiled_case, num_tokens=1, num_heads=len(few), page_size=2)
    check_write(single_case, few[None, :, None], few[None, :, None])
    scales = 10.0 ** torch.linspace(-44, 38, 32)
    case = dataclasses.replace(tiled_case, dynamic=False)
    pages = test_ops.replace_scales(make_noise_pages(case), scales[None], scales[None].flip(1))
    actual = copy_to_device(pages)
    write(actual, states.to(DEVICE), states.to(DEVICE), make_lengths(case) + case.num_tokens)
    actual = map_pages(torch.Tensor.cpu, actual)
    assert_same_pages(actual, compute_expected(case, pages, states, states))


@triton.jit
def _encode(x, codes, FORMAT: tl.constexpr, N: tl.constexpr):
    offsets = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(codes + offsets, encoder.encode(tl.load(x + offsets), FORMAT))


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_the_encoder_rounds_values_of_every_binade_correctly(name):
    """The values are all upper halves of a float32, with lower halves at which rounding changes."""
    upper_halves = torch.arange(0, 1 << 16, dtype=torch.int32) << 16
    lower_halves = (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)
    x = torch.cat([upper_halves | half for half in lower_halves]).view(torch.float32).to(DEVICE)
    actual = torch.empty(len(x), dtype=torch.uint8, device=DEVICE)
    _encode[(len(lower_halves),)](
        x, actual, FORMATS[name], 1 << 16, enable_fp_fusion=False, num_warps=8
    )
    expected = codec.encode(x.cpu(), FORMATS[name])
    assert_same(to_comparable_bytes(actual.cpu(), name), to_comparable_bytes(expected, name))


GATHER_CASES = [
    *(
        Case(k_format=name, v_format=NEXT_FORMAT[name], lengths=(5, 37), page_size=6, dynamic=False)
        for name in ALL_NAMES[::2]
    ),
    *(
        Case(k_format=name, v_format=NEXT_FORMAT[name], lengths=(5, 37), page_size=16, center=True)
        for name in ALL_NAMES[1::2]
    ),
]
GATHER_CASES += [
    Case(k_format="fp8_e2m5", v_format="int8", lengths=(5, 37), rotated=True, **options)
    for options in (
        {"page_size": 16, "k_dim": 96, "v_dim": 80, "center": True},
        {"page_size": 6, "k_dim": 80, "v_dim": 256, "dynamic": False},
        {"page_size": 64, "k_dim": 128, "v_dim": 64},
    )
]


# Freed pages are read as page 0, which callers mask.
GATHER_CASES.append(Case(lengths=(40, 50), num_freed_pages=1, k_dim=24, v_dim=40))

# The range determines which pages are read. The dtype determines how the result is rounded.
GATHER_ARGUMENTS = pairwise(
    ["k", "v"],
    [torch.float32, torch.bfloat16, torch.float16],
    [(0, 38, True), (3, 5, False), (9, 35, True), (0, 0, False)],
)


@pytest.mark.parametrize("case", GATHER_CASES, ids=str)
def test_gather_decodes_all_bytes(case):
    """Pages hold random bytes, so all codes occur, including NaN and infinity."""
    pages = make_noise_pages(case)
    if (scales := pages.regions.get("token_scales")) is not None:
        scales.copy_(torch.randn(scales.shape))
    lengths = torch.tensor(case.lengths, dtype=torch.int32)
    stored = (
        split_into_blocks(pages, device=DEVICE) if case.page_size == 6 else copy_to_device(pages)
    )
    for side, dtype, (start, stop, ragged) in GATHER_ARGUMENTS:
        expected = reference.gather(pages, lengths, side, start, stop, dtype, ragged)
        actual = gather(stored, lengths.to(DEVICE), side, start, stop, dtype, ragged)
        assert actual.dtype == dtype
        torch.testing.assert_close(actual.cpu(), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("num_tokens", [1, 20])
def test_addresses_past_four_gigabytes_are_correct(num_tokens, tmp_path):
    """The block has 8 GiB. On a CPU, it is a sparse file."""
    case = Case(
        lengths=(12,), num_tokens=num_tokens, k_dim=128, v_dim=128, page_size=64, num_heads=1,
        dynamic=False,
    )  # fmt: skip
    num_pages = (1 << 32) // (64 * 128) + 2
    pages = make_noise_pages(case)
    pages.block.zero_()
    key, value = make_tokens(case)
    expected = compute_expected(case, pages, key, value)
    shape = num_pages, pages.block.shape[1]
    if DEVICE.type == "cuda":
        block = torch.zeros(shape, dtype=torch.uint8, device=DEVICE)
    else:
        path = str(tmp_path / "pages")
        block = torch.from_file(path, shared=True, size=math.prod(shape), dtype=torch.uint8)
        block = block.view(shape)
    table = torch.tensor([[num_pages - 1]], dtype=torch.int32, device=DEVICE)
    actual = copy_to_device(pages)._replace(block=block, offsets=locate_pages([block]), table=table)
    write(actual, key.to(DEVICE), value.to(DEVICE), make_lengths(case) + case.num_tokens)
    lengths = make_lengths(case) + num_tokens
    for side in ("k", "v"):
        expected_dense = reference.gather(expected, lengths.cpu(), side, 0, 40, torch.float32, True)
        dense = gather(actual, lengths, side, 0, 40, torch.float32, True)
        assert_same(dense.cpu(), expected_dense)
