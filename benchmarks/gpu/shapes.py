"""Define the cases of the GPU benchmark, at full size and for a dry run."""

from dataclasses import dataclass, replace

from hf_fp8kv.formats import AUTO, DISTINCT
from hf_fp8kv.ops import AttentionSpec
from hf_fp8kv.ops.visibility import first_visible


@dataclass(frozen=True)
class Heads:
    """Heads of one layer."""

    query: int
    kv: int
    dim: int
    positions: int = 0  # 16-bit values of the RoPE part next to a latent (MLA), 0 without latents

    @property
    def query_dim(self) -> int:
        """Size of a query."""
        return self.dim + self.positions

    def bytes_per_token(self, kind: "Kind") -> float:
        """Return the bytes that are read for a stored token, with its scales."""
        if not self.positions:
            return 2 * self.kv * self.dim * kind.bytes_per_value(self.dim)
        # The scales of a token are one word, although the RoPE part needs none.
        word = 0 if kind.static or kind.format == AUTO else 4
        return self.dim * (2 if kind.format == AUTO else 1) + word + 2 * self.positions


@dataclass(frozen=True)
class Kind:
    """A format of stored K and V."""

    name: str
    format: str  # a key of `formats.FORMATS`, or "auto"
    static: bool = False  # whether the scales are constants

    @property
    def is_rare(self) -> bool:
        """Whether this kind is only measured in cases with all contenders."""
        return self.static or self.format in _LIKE_E3M4

    def bytes_per_value(self, dim: int) -> float:
        """Return the bytes that are read for a value of K or V, with its share of a scale."""
        if self.format == AUTO:
            return 2.0
        return 1.0 if self.static else 1.0 + 2.0 / dim


BF16 = Kind("bf16 pages", AUTO)
# The same instructions decode these formats, with shifts by different numbers of bits.
_LIKE_E3M4 = ("fp8_e2m5", "int8")
# Whether scales are static. The other formats are measured with dynamic scales.
_STATIC = {"fp8_e4m3": (False, True), "fp8_e5m2": (True,)}
KINDS = (
    *(
        Kind(fmt.name.removeprefix("fp8_") + " static" * static, fmt.name, static)
        for fmt in DISTINCT
        for static in _STATIC.get(fmt.name, (False,))
    ),
    BF16,
)
_NAMED = {kind.name: kind for kind in KINDS}
E4M3, E3M4 = _NAMED["e4m3"], _NAMED["e3m4"]


@dataclass(frozen=True)
class Case:
    """One attention call."""

    lengths: tuple[int, ...]  # stored tokens of each sequence, including the new ones
    heads: Heads = Heads(32, 8, 128)
    tokens: int = 1  # new tokens of each sequence
    window: int = 0
    softcap: float = 0.0
    label: str = ""  # name in rows, by default batch and length
    padding: tuple[int, ...] = ()  # hidden tokens at the start of each sequence
    scaling: float = 0.0  # factor of the logits, by default from the size of a query

    def __str__(self) -> str:
        return self.label or f"{len(self.lengths)} x {format_tokens(self.lengths[0])}"

    @property
    def is_ragged(self) -> bool:
        """Whether lengths differ."""
        return len(set(self.lengths)) > 1

    @property
    def read(self) -> int:
        """Tokens that are read, over all sequences."""
        if not self.window:
            return sum(self.lengths) - sum(self.padding)
        firsts = (first_visible(n - self.tokens, self.window) for n in self.lengths)
        return sum(n - max(first, 0) for n, first in zip(self.lengths, firsts, strict=True))

    @property
    def flops(self) -> int:
        """Operations of the two products, over visible tokens only."""
        if self.window:
            visible = sum(self.tokens * min(n, self.window) for n in self.lengths)
        else:
            hidden = self.tokens * (self.tokens - 1) // 2
            stored = sum(self.lengths) - sum(self.padding)
            visible = self.tokens * stored - hidden * len(self.lengths)
        return 2 * self.heads.query * (self.heads.query_dim + self.heads.dim) * visible

    def bytes_read(self, kind: Kind) -> float:
        """Return the bytes of K and V that are read."""
        return self.read * self.heads.bytes_per_token(kind)

    def describe(self) -> dict[str, int]:
        """Return the fields of a row that describe the work of a call."""
        return {"flops": self.flops, "batch": len(self.lengths), "read": self.read}

    def pad_left(self) -> "Case":
        """Return the case with up to half of each sequence hidden, like prompts of one batch."""
        batch = len(self.lengths)
        hidden = (n * b // (2 * batch) for b, n in enumerate(self.lengths, batch % 2))
        return replace(self, label=str(self), padding=tuple(hidden))

    def attention_spec(self) -> AttentionSpec:
        """Return the specification for `ops.attend`."""
        return AttentionSpec(
            self.scaling or self.heads.query_dim**-0.5, causal=True, window=self.window,
            softcap=self.softcap, latent=self.heads.positions > 0,
        )  # fmt: skip


def format_tokens(tokens: int) -> str:
    """Return a short form of a number of tokens, such as "32k"."""
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else str(tokens)


@dataclass(frozen=True)
class ModelShape:
    """The shape of a random model."""

    layers: int
    hidden: int
    vocabulary: int
    heads: Heads


@dataclass(frozen=True)
class Served(ModelShape):
    """A model and its requests, for engines."""

    requests: tuple[int, ...]  # numbers of simultaneous requests, the most important first
    prompts: tuple[int, int]  # tokens of the shortest and of the longest prompt
    new: int  # tokens of each answer
    warm: int  # tokens of each answer in the warm-up
    page_size: int
    batch_tokens: int  # maximum number of tokens of a step


@dataclass(frozen=True)
class Sizes(ModelShape):
    """The sizes of a run and of its model. `TINY` runs everything within seconds, untimed."""

    decode: tuple[Case, ...]
    padded: tuple[str, ...]  # names of decode cases that are also measured with left padding
    compared: int  # number of cases with all contenders
    layer: tuple[Case, ...]  # steps of one layer
    layer_kinds: tuple[Kind, ...]  # the first one is also called eagerly
    others: tuple[Case, ...]  # other heads and attention, and several new tokens
    writes: tuple[int, ...]  # batches of one new token for each sequence
    prefill: int  # tokens of a prompt that is written
    extend: tuple[tuple[int, int], ...]  # stored and new tokens of one sequence
    latents: tuple[Case, ...]  # steps over latents
    generate: tuple[tuple[int, int], ...]  # batch and context, the most important first
    prompt: int  # tokens of a first call
    offloaded: tuple[tuple[int, int], ...]  # batch and context of caches in host memory
    tokens: tuple[int, int]  # timed new tokens, eager and compiled
    warm: tuple[int, int]  # untimed tokens before them, which compile and capture graphs
    served: Served
    pages: int  # number of different random pages
    seconds: dict[str, float]  # share of the time of each section


# Cases that goals need come first, because time may run out.
_DECODE = [
    Case((1024 * n,) * batch)
    for batch, n in (
        (8, 32), (50, 32), (64, 32), (1, 256), (1, 1), (98, 4), (16, 32), (1, 32), (256, 1),
        (2, 128), (4, 64), (32, 8), (128, 2), (64, 4), (8, 128), (1, 4), (4, 4), (16, 4), (64, 1),
    )
]  # fmt: skip
_DECODE.insert(8, Case((4641, 45118, 1730, 1696), label="ragged"))
# Heads of DeepSeek's models.
_LATENTS = [
    Case((1024 * n,) * batch, Heads(count, 1, 512, 64), label=f"{count} heads, {batch} x {n}k")
    for batch, n in ((1, 16), (16, 16), (16, 32), (1, 32), (1, 4), (16, 4))
    for count in (16, 128)
]
_LONG = (32768,) * 4
FULL = Sizes(
    decode=tuple(_DECODE),
    padded=("16 x 32k", "98 x 4k", "1 x 32k"),
    compared=4,
    layer=tuple(Case((1024 * n,) * b) for b, n in ((1, 1), (8, 32), (1, 32), (64, 4))),
    layer_kinds=(E3M4, E4M3, BF16),
    latents=tuple(_LATENTS),
    others=(
        Case((32768,) * 16, Heads(32, 32, 128), label="16 x 32k, MHA"),
        # More than 16 query rows: query heads of a KV head times tokens.
        Case(_LONG, tokens=8, label="4 x 32k, T 8 (32 rows)"),
        Case(_LONG, Heads(64, 8, 128), tokens=3, label="4 x 32k, G 8, T 3 (24 rows)"),
        Case(_LONG, tokens=16, label="4 x 32k, T 16 (64 rows)"),
        # Other projects have published results for these shapes.
        Case((2048,) * 128, Heads(64, 8, 128), label="128 x 2k, G 8"),
        Case((32768,) * 32, Heads(8, 1, 128), label="32 x 32k, 8 heads over 1"),
        Case(_LONG, tokens=4, label="4 x 32k, T 4 (16 rows)"),
        Case(_LONG, Heads(64, 8, 128), label="4 x 32k, G 8"),
        Case(_LONG, Heads(32, 8, 64), label="4 x 32k, D 64"),
        Case(_LONG, Heads(16, 8, 256), label="4 x 32k, D 256"),
        Case(_LONG, window=4096, label="4 x 32k, window 4k"),
        Case(_LONG, softcap=50.0, label="4 x 32k, softcap"),
    ),
    writes=(1, 4, 16, 64), prefill=8192,
    extend=tuple((stored, new) for stored in (8192, 0, 32768) for new in (2048, 512, 64, 8192)),
    layers=32, hidden=4096, vocabulary=128256, heads=Heads(32, 8, 128),
    generate=((8, 32768), (1, 1024), (1, 32768), (8, 1024)), tokens=(12, 32), warm=(3, 8),
    prompt=8192, offloaded=((1, 32768), (1, 131072)),
    served=Served(16, 2048, 32000, Heads(32, 8, 64), (128, 32), (200, 2000), 128, 8, 256, 8192),
    pages=64,
    seconds={
        "ceilings": 4, "decode": 20, "layer": 5, "write": 5, "extend": 8, "latent": 17,
        "end to end": 76, "offloaded": 6, "others": 3, "other kernels": 1, "serving": 5,
    },
)  # fmt: skip

_SMALL = Heads(4, 2, 16)
TINY = replace(
    FULL,
    decode=(Case((70,) * 2, _SMALL), Case((1, 33, 130), _SMALL, label="ragged")),
    padded=("2 x 70",), compared=1,
    layer=(Case((70,) * 2, _SMALL),),
    latents=(Case((70,) * 2, Heads(4, 1, 32, 16), label="4 heads, 2 x 70"),),
    others=(
        Case((70,), Heads(2, 2, 16), label="1 x 70, MHA"),
        Case((70, 65), _SMALL, tokens=4, label="2 x 70, T 4"),
        Case((70, 65), _SMALL, window=20, label="2 x 70, window"),
        Case((70,), _SMALL, softcap=5.0, label="1 x 70, softcap"),
    ),
    writes=(1, 3), prefill=20, extend=((0, 20), (70, 20)),
    layers=2, hidden=32, vocabulary=64, heads=_SMALL,
    generate=((2, 40),), prompt=20, offloaded=((2, 130),), tokens=(3, 3), warm=(2, 2),
    served=Served(2, 32, 64, _SMALL, (3,), (3, 20), 3, 2, 8, 32),
    pages=4, seconds=dict.fromkeys(FULL.seconds, 120.0),
)  # fmt: skip

# Number of stored tokens for compilation. More tokens use the same kernels.
_SHORT = 1024


def shorten(sizes: Sizes) -> Sizes:
    """Return the sizes with shorter sequences, without cases that need no additional kernel."""

    def short(cases: tuple[Case, ...]) -> tuple[Case, ...]:
        shortened = (
            replace(case, lengths=tuple(min(n, _SHORT) for n in case.lengths), label="")
            for case in cases
        )
        return tuple(dict.fromkeys(shortened))

    decode = short(sizes.decode)
    return replace(
        sizes, decode=decode, padded=(str(decode[0]),), compared=1, layer=short(sizes.layer),
        latents=short(sizes.latents), others=short(sizes.others), writes=sizes.writes[:1],
        extend=tuple(dict.fromkeys((min(stored, _SHORT), new) for stored, new in sizes.extend)),
    )  # fmt: skip
