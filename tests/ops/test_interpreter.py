"""The repaired interpreter of Triton against torch: what the tests of the kernels stand on."""

import pytest
import torch

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

pytestmark = [
    pytest.mark.usefixtures("interpreted"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run on the GPU, not interpreted"),
]

EIGHT_BIT = {
    "e4nv": torch.float8_e4m3fn,
    "e5": torch.float8_e5m2,
    "e4b8": torch.float8_e4m3fnuz,
    "e5b16": torch.float8_e5m2fnuz,
}


@triton.jit
def _convert(X, OUT, FROM: tl.constexpr, TO: tl.constexpr, N: tl.constexpr):
    """FROM: read bits as numbers of that type; TO: store the bits of numbers of that type."""
    at = tl.arange(0, N)
    x = tl.load(X + at)
    if FROM is not None:
        x = x.to(FROM, bitcast=True)
    if TO is not None:
        x = x.to(TO).to(tl.uint8, bitcast=True)
    tl.store(OUT + at, x.to(OUT.dtype.element_ty))


@triton.jit
def _compute(X, Y, MIXED, LARGEST, PRODUCT, COUNT, N: tl.constexpr):
    at = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    x, y = tl.load(X + at), tl.load(Y + at)
    tl.store(MIXED + at, tl.where(x > y, x + y, x * y - tl.maximum(x, y)))
    tl.store(LARGEST + tl.arange(0, N), tl.max(x, 1))
    product = tl.zeros([N, N], dtype=tl.float32)
    for _ in range(tl.load(COUNT)):
        product += tl.dot(x, y)
    tl.store(PRODUCT + at, product)


def interesting() -> torch.Tensor:
    """Return numbers of every binade, ties, both zeros, subnormal numbers, infinities and NaN."""
    every = torch.arange(0, 1 << 16, dtype=torch.int32) << 16
    return torch.cat([every, every | 0x8000, every | 0x7FFF, every | 0x8001]).view(torch.float32)


def same(found: torch.Tensor, expected: torch.Tensor) -> None:
    found, expected = found.float(), expected.float()
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.nan_to_num(0), expected.nan_to_num(0))


@pytest.mark.parametrize("kind", EIGHT_BIT)
def test_eight_bits_are_read_exactly_and_rounded_as_the_hardware_does(kind):
    codes = torch.arange(256, dtype=torch.uint8)
    for to in (torch.float32, torch.float16, torch.bfloat16):
        out = torch.empty(256, dtype=to)
        _convert[(1,)](codes, out, getattr(tl, f"float8{kind}"), None, 256)
        same(out, codes.view(EIGHT_BIT[kind]).to(to))
    x = interesting()
    out = torch.empty(len(x), dtype=torch.uint8)
    _convert[(1,)](x, out, None, getattr(tl, f"float8{kind}"), len(x))
    top = torch.finfo(EIGHT_BIT[kind]).max
    same(out.view(EIGHT_BIT[kind]), x.clamp(-top, top).to(EIGHT_BIT[kind]))


@pytest.mark.parametrize("to", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("source", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_numbers_are_rounded_to_sixteen_bits(source, to):
    x = interesting().to(source)
    out = torch.empty(len(x), dtype=to)
    _convert[(1,)](x, out, None, None, len(x))
    same(out, x.to(to))


def test_bfloat16_is_computed_with_as_numbers():
    x, y = torch.randn(16, 16).bfloat16(), torch.randn(16, 16).bfloat16()
    mixed, largest, product = torch.empty_like(x), torch.empty_like(x[0]), torch.empty(16, 16)
    _compute[(1,)](x, y, mixed, largest, product, torch.tensor([3], dtype=torch.int32), 16)
    same(mixed, torch.where(x > y, x + y, x * y - torch.maximum(x, y)))
    same(largest, x.amax(1))
    torch.testing.assert_close(product, 3 * (x.float() @ y.float()), rtol=1e-6, atol=1e-5)


def test_a_maximum_passes_over_nan_as_on_a_gpu():
    x, y = torch.randn(16, 16), torch.zeros(16, 16)
    x[:, 3] = torch.nan
    mixed, largest, product = torch.empty_like(x), torch.empty(16), torch.empty(16, 16)
    _compute[(1,)](x, y, mixed, largest, product, torch.tensor([1], dtype=torch.int32), 16)
    same(largest, x.nan_to_num(-torch.inf).amax(1))
