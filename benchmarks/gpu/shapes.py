"""Define the cases of the GPU benchmark, at full size and for a dry run."""

import itertools
from dataclasses import dataclass, replace

from hf_fp8kv.formats import AUTO, FORMATS
from hf_fp8kv.ops import AttentionSpec


@dataclass(frozen=True)
class Heads:
    """Numbers and sizes of the heads of one layer."""

    num_query_heads: int
    num_kv_heads: int
    dim: int  # size of a head, or of a latent
    rope_dim: int = 0  # size of the 16-bit RoPE part next to a latent (MLA), 0 without latents

    @property
    def query_dim(self) -> int:
        return self.dim + self.rope_dim

    def compute_bytes_per_token(self, fmt: "PageFormat") -> float:
        """Return the number of bytes that are read for a stored token, including its scales."""
        if not self.rope_dim:
            return 2 * self.num_kv_heads * self.dim * fmt.compute_bytes_per_value(self.dim)
        # The scales of a token take one 32-bit word, although the RoPE part has no scale.
        scale_bytes = 0 if fmt.is_static or fmt.dtype == AUTO else 4
        return self.dim * (2 if fmt.dtype == AUTO else 1) + scale_bytes + 2 * self.rope_dim


@dataclass(frozen=True)
class PageFormat:
    """The format in which K and V are stored, with static or dynamic scales."""

    name: str
    dtype: str  # a key of `formats.FORMATS`, or "auto"
    is_static: bool = False  # whether the scales are constants

    def compute_bytes_per_value(self, dim: int) -> float:
        """Return the bytes that are read for a value of K or V, with its share of a scale."""
        if self.dtype == AUTO:
            return 2.0
        return 1.0 if self.is_static else 1.0 + 2.0 / dim


BF16 = PageFormat("bf16 pages", AUTO)
PAGE_FORMATS = (
    PageFormat("e4m3", "fp8_e4m3"),
    PageFormat("e4m3 static", "fp8_e4m3", is_static=True),
    PageFormat("e5m2 static", "fp8_e5m2", is_static=True),
    *(
        PageFormat(fmt.name.removeprefix("fp8_"), fmt.name)
        for fmt in FORMATS.values()
        if fmt.bits == 8 and fmt.name not in ("fp8_e4m3", "fp8_e4m3fnuz", "fp8_e5m2")
    ),
    BF16,
)
_FORMATS_BY_NAME = {fmt.name: fmt for fmt in PAGE_FORMATS}
E4M3, E3M4, INT8 = (_FORMATS_BY_NAME[name] for name in ("e4m3", "e3m4", "int8"))


@dataclass(frozen=True)
class Case:
    """One attention call."""

    lengths: tuple[int, ...]  # stored tokens of each sequence, including the new tokens
    heads: Heads = Heads(32, 8, 128)
    num_new_tokens: int = 1  # new tokens of each sequence
    window: int = 0  # tokens that a query attends to, 0 for all
    softcap: float = 0.0  # bound of the logits, 0 for none
    label: str = ""  # name in rows, by default the batch size and the length
    padding: tuple[int, ...] = ()  # hidden tokens at the start of each sequence
    scaling: float = 0.0  # factor of the logits, 0 for `query_dim**-0.5`

    def __str__(self) -> str:
        return self.label or f"{len(self.lengths)} x {format_tokens(self.lengths[0])}"

    @property
    def tokens_read(self) -> int:
        """Number of tokens that are read without a window, over all sequences."""
        return sum(self.lengths) - sum(self.padding)

    @property
    def flops(self) -> int:
        """Floating-point operations of the two products without a window, over visible tokens."""
        num_hidden = self.num_new_tokens * (self.num_new_tokens - 1) // 2
        num_pairs = self.num_new_tokens * self.tokens_read - num_hidden * len(self.lengths)
        return 2 * self.heads.num_query_heads * (self.heads.query_dim + self.heads.dim) * num_pairs

    def count_bytes_read(self, fmt: PageFormat) -> float:
        """Return the bytes of K and V that are read, including their scales."""
        return self.tokens_read * self.heads.compute_bytes_per_token(fmt)

    def describe(self) -> dict[str, int]:
        """Return the fields of a row that describe the work of a call."""
        return {"flops": self.flops, "batch": len(self.lengths), "read": self.tokens_read}

    def pad_left(self) -> "Case":
        """Return the case with left padding of up to half of each sequence, as in a batch."""
        batch = len(self.lengths)
        # The padding grows with the row. A single sequence is padded by half of its length.
        padding = tuple(
            length * row // (2 * batch) for row, length in enumerate(self.lengths, batch % 2)
        )
        return replace(self, label=str(self), padding=padding)

    def make_attention_spec(self) -> AttentionSpec:
        return AttentionSpec(
            self.scaling or self.heads.query_dim**-0.5, causal=True, window=self.window,
            softcap=self.softcap, latent=self.heads.rope_dim > 0,
        )  # fmt: skip


def format_tokens(num_tokens: int) -> str:
    """Return a short string for a number of tokens, for example "32k"."""
    return f"{num_tokens // 1024}k" if num_tokens % 1024 == 0 else str(num_tokens)


@dataclass(frozen=True)
class RunSizes:
    """The cases of each section, and the model's shape. `TINY` runs in seconds, without timing."""

    decode_cases: tuple[Case, ...]
    padded_cases: tuple[str, ...]  # names of decode cases that are also measured with left padding
    num_full_cases: int  # number of decode cases with all contenders
    layer_cases: tuple[Case, ...]  # steps of one layer
    layer_formats: tuple[PageFormat, ...]  # the first format is also called eagerly
    write_batches: tuple[int, ...]  # batch sizes, with one new token for each sequence
    written_tokens: int  # tokens of a prompt that is written
    extend_shapes: tuple[tuple[int, int], ...]  # stored and new tokens of one sequence
    latent_cases: tuple[Case, ...]  # steps over latents
    num_layers: int  # layers of the model that `generate()` runs
    vocab_size: int  # vocabulary of this model
    heads: Heads  # heads of this model, and of cases of other sections
    generate_shapes: tuple[tuple[int, int], ...]  # batch and context, most important first
    prompt_tokens: int  # tokens of the prompt of a first call
    offloaded_shapes: tuple[tuple[int, int], ...]  # batch and context of caches in host memory
    num_rounds: int  # rounds in which contenders alternate, after their first call
    round_tokens: int  # new tokens of a contender in a round
    num_pages: int  # number of random pages that pools repeat
    time_weights: dict[str, float]  # relative time of each section
    with_compiled: bool = True  # whether `generate()` is also measured with torch.compile


# The most important cases come first, because the time may run out.
_DECODE_CASES = tuple(
    Case((1024 * kilotokens,) * batch)
    for batch, kilotokens in (
        (8, 32), (50, 32), (64, 32), (1, 256), (1, 1), (98, 4), (16, 32), (1, 32), (256, 1),
        (2, 128), (4, 64), (32, 8), (128, 2), (64, 4), (8, 128), (1, 4), (4, 4), (16, 4), (64, 1),
    )
)  # fmt: skip
# Numbers of query heads of DeepSeek's models (MLA).
_LATENT_CASES = tuple(
    Case(
        (1024 * kilotokens,) * batch,
        Heads(num_heads, 1, 512, 64),
        label=f"{num_heads} heads, {batch} x {kilotokens}k",
    )
    for (batch, kilotokens), num_heads in itertools.product(
        ((1, 16), (16, 16), (16, 32), (1, 32), (1, 4), (16, 4)), (16, 128)
    )
)
FULL = RunSizes(
    decode_cases=_DECODE_CASES, padded_cases=("16 x 32k", "98 x 4k", "1 x 32k"), num_full_cases=4,
    layer_cases=tuple(
        Case((1024 * kilotokens,) * batch)
        for batch, kilotokens in ((1, 1), (8, 32), (1, 32), (64, 4))
    ),
    layer_formats=(E3M4, E4M3, BF16), latent_cases=_LATENT_CASES,
    write_batches=(1, 4, 16, 64), written_tokens=8192,
    extend_shapes=tuple(itertools.product((8192, 0, 32768), (2048, 512, 64, 8192))),
    num_layers=32, vocab_size=128256, heads=Heads(32, 8, 128),
    generate_shapes=((8, 32768), (1, 1024), (1, 32768), (8, 1024)), prompt_tokens=8192,
    num_rounds=8, round_tokens=40, offloaded_shapes=((1, 32768), (1, 131072)), num_pages=64,
    time_weights={
        "ceilings": 4, "decode": 20, "layer": 5, "write": 5, "extend": 8, "latent": 20,
        "end to end": 78, "offloaded": 6, "other kernels": 4,
    },
)  # fmt: skip

# The sizes of the first eight minutes on a new GPU (first.py).
SHORT = replace(
    FULL,
    decode_cases=(_DECODE_CASES[0], Case((1024,)), Case((32768,)), Case((4096,) * 64)),
    padded_cases=(), latent_cases=_LATENT_CASES[:4],
    extend_shapes=((0, 8192), (8192, 64), (32768, 64), (0, 2048), (0, 32768)),
    generate_shapes=((8, 32768), (1, 1024), (8, 1024)), num_rounds=4, with_compiled=False,
)  # fmt: skip

_SMALL_HEADS = Heads(4, 2, 16)
TINY = replace(
    FULL,
    decode_cases=(Case((70,) * 2, _SMALL_HEADS), Case((130,), _SMALL_HEADS)),
    padded_cases=("2 x 70",), num_full_cases=1,
    layer_cases=(Case((70,) * 2, _SMALL_HEADS),),
    latent_cases=(Case((70,) * 2, Heads(4, 1, 32, 16), label="4 heads, 2 x 70"),),
    write_batches=(1, 3), written_tokens=20, extend_shapes=((0, 20), (70, 20)),
    num_layers=2, vocab_size=64, heads=_SMALL_HEADS,
    generate_shapes=((2, 40),), prompt_tokens=20, offloaded_shapes=((2, 130),),
    num_rounds=2, round_tokens=4, num_pages=4,
    time_weights=dict.fromkeys(FULL.time_weights, 120.0),
)  # fmt: skip

# Maximum number of stored tokens for compilation. More tokens use the same kernels.
_COMPILED_TOKENS = 1024


def shorten_sizes(sizes: RunSizes) -> RunSizes:
    """Return sizes with shorter sequences, and without cases that need no additional kernel."""

    def shorten_cases(cases: tuple[Case, ...]) -> tuple[Case, ...]:
        short_cases = []
        for case in cases:
            lengths = tuple(min(length, _COMPILED_TOKENS) for length in case.lengths)
            short_cases.append(replace(case, lengths=lengths, label=""))
        return tuple(dict.fromkeys(short_cases))

    decode_cases = shorten_cases(sizes.decode_cases)
    shapes = ((min(stored, _COMPILED_TOKENS), new) for stored, new in sizes.extend_shapes)
    return replace(
        sizes, decode_cases=decode_cases, padded_cases=(str(decode_cases[0]),), num_full_cases=1,
        layer_cases=shorten_cases(sizes.layer_cases), write_batches=sizes.write_batches[:1],
        latent_cases=shorten_cases(sizes.latent_cases), extend_shapes=tuple(dict.fromkeys(shapes)),
    )  # fmt: skip
