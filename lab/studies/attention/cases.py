"""The cases of the study: kernels, a block, layers beside torch's, the tutorial's; the options."""

import random
from argparse import Namespace
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, ClassVar, Literal

from apprentice.errors import BadInput
from harness import cli
from harness.runs.arm_names import pick
from harness.runs.options import OneSeedOptions

BACKENDS = ("auto", "math", "flash", "efficient", "cudnn", "flex")
PARTS = ("kernels", "blocks", "layers", "tutorial", "profile")
LAYERS = ("SelfAttention", "MultiheadAttention", "Block", "TransformerEncoderLayer")  # each beside torch's own
WITH_MLP = LAYERS[2:]
LONGEST = 2**20  # tokens
DTYPES = ("float32", "float16", "bfloat16")
QUICK = {
    "lengths": [16, 32], "block_lengths": [32], "tokens": 64, "heads": 2, "head_dim": 8, "dtypes": ["float32"],
    "parts": ["kernels", "blocks", "profile"], "seconds": 0.001,
}  # fmt: skip
COUNT = cli.Limit(lambda value: value >= 1, "at least 1")


@dataclass
class Options(OneSeedOptions):
    """Options of the study; sizes that are not given fit the device."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes a GPU where there is one."""
    parts: list[str] | None = cli.option(None, on_resume=cli.GROWS)
    """measure just these of kernels, blocks, layers, tutorial, profile."""
    backends: list[str] | None = cli.option(None, on_resume=cli.GROWS)
    """just these kernels, such as math flash; all when not given."""
    dtypes: list[str] = cli.option(lambda: list(DTYPES), on_resume=cli.GROWS)
    """of float32, float16 and bfloat16."""
    lengths: list[int] | None = cli.option(None, on_resume=cli.GROWS)
    """tokens of a text, for the kernels."""
    block_lengths: list[int] | None = cli.option(None, on_resume=cli.GROWS)
    """tokens of a text, for the block and for layers, eager and compiled."""
    tokens: int | None = cli.option(None, COUNT)
    """of a batch, as near as texts of a length come to it, of the tutorial's shapes too."""
    heads: int = cli.option(8, COUNT)
    """of the attention."""
    head_dim: int = cli.option(64, COUNT)
    """width of a head."""
    seconds: float = cli.option(0.2, cli.SECONDS)
    """for which a row is timed at least."""
    longest: float = cli.option(1.0, cli.SECONDS)
    """seconds; a block whose products of matrices take longer than that is left out."""
    quick: bool = False
    """take small sizes wherever none are given, to see what comes out."""
    quick_values: ClassVar[Mapping[str, Any]] = QUICK
    idle: ClassVar[Collection[str]] = ("num_classes", "checkpoint_every")
    why_inexact: ClassVar[str] = "nothing is trained"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("lengths", "block_lengths"):
            sizes = getattr(self, name)
            if sizes is not None and (
                not sizes or len(set(sizes)) < len(sizes) or min(sizes) < 2 or max(sizes) > LONGEST
            ):
                raise BadInput(name, sizes, f"numbers of tokens, at least 2, at most {LONGEST}, none of them twice")


@dataclass(frozen=True)
class Case:
    """One call that is timed."""

    part: str  # of the study
    dtype: str  # torch's name
    batch: int  # texts
    length: int  # tokens of the longest
    heads: int  # of the attention
    head_dim: int  # width of a head
    block: bool = False  # whether it is a block with its projections, or the kernel by itself
    layer: str = ""  # the block's class, where it is compared with torch's
    backend: str = "auto"  # which kernel
    causal: bool = True  # whether tokens see none that come later
    backward: bool = False  # whether gradients are computed, too
    compiled: bool = False  # whether by torch.compile
    lengths: tuple[int, ...] | None = None  # tokens of each text; None where all are padded to one length
    bias: bool = True  # whether the block's projections have one
    dropout: float = 0.0  # of the block, in training
    tutorial_us: float | None = None  # what PyTorch's tutorial prints for it

    @property
    def name(self) -> str:
        """Return the row's name: `kernels: flash, float32, 4 x 512, forward`; a block has `jagged eager`."""
        layout, mode = "dense" if self.lengths is None else "jagged", "compiled" if self.compiled else "eager"
        what = f"{self.layer or layout} {mode}" if self.block else self.backend
        return f"{self.part}: {what}, {self.dtype}, {self.batch} x {self.length}, {self.direction}"

    @property
    def direction(self) -> str:
        return "forward + backward" if self.backward else "forward"

    @property
    def width(self) -> int:
        return self.heads * self.head_dim

    @property
    def operations(self) -> float:
        """Count floating-point operations of a call, with padding.

        Attention has 4 T² D, half of it if causal, and 2.5 times as many backward (FlashAttention-2, Dao 2023, section
        4.1).
        """
        attention = 4 * self.width * sum(n * n for n in self.tokens) / (2 if self.causal else 1)
        return (3.5 * attention if self.backward else attention) + self.projections

    @property
    def projections(self) -> float:
        """Count operations of the block's projections: 8 T D², with an MLP 24 T D²; twice as many backward."""
        forward = (24 if self.layer in WITH_MLP else 8) * self.width**2 * sum(self.tokens) if self.block else 0
        return 3 * forward if self.backward else forward

    @property
    def tokens(self) -> tuple[int, ...]:
        """Return the tokens of each text, with padding."""
        return self.lengths or (self.length,) * self.batch


# Lengths for the kernels and for the block, tokens of a batch, type of the tutorial's shapes, which takes float16
SIZES = {
    "cuda": ([2**n for n in range(7, 15)], [2**n for n in range(7, 15)], 2**14, "float16"),
    "cpu": ([128, 512, 2048], [512], 2048, "float32"),
}


def all_cases(options: Namespace, device: str) -> list[Case]:
    """Return all cases for a kind of device, cpu or cuda, in the order of the tables."""
    lengths, block_lengths, tokens, tutorials_dtype = SIZES[device]
    parts = pick(dict.fromkeys(PARTS), options.parts, "parts")
    backends = pick(dict.fromkeys(BACKENDS), options.backends, "backends")
    dtypes = pick(dict.fromkeys(DTYPES), options.dtypes, "dtypes")

    def cases_of(part: str, lengths: Sequence[int]) -> Iterator[Case]:
        for dtype, backward, length in product(dtypes, (False, True), lengths):
            batch = max((options.tokens or tokens) // length, 1)
            yield Case(part, dtype, batch, length, options.heads, options.head_dim, backward=backward)

    # The causal block in the size that the tutorial profiles
    size = (2, 16, 2, 8) if options.quick else (32, 256, 8, 64)
    profiled = Case("profile", tutorials_dtype, *size, block=True, bias=False)
    cases = {
        "kernels": [
            replace(case, backend=backend)
            for case in cases_of("kernels", options.lengths or lengths)
            for backend in backends
        ],
        "blocks": [  # without a mask: on a CPU torch has no kernel for jagged texts with one
            replace(case, block=True, causal=False, compiled=compiled, lengths=texts)
            for case in cases_of("blocks", options.block_lengths or block_lengths)
            for texts in (None, half_padded(case.batch, case.length))
            for compiled in (False, True)
        ],
        "layers": [
            replace(case, block=True, causal=False, compiled=compiled, layer=layer)
            for case in cases_of("layers", options.block_lengths or block_lengths)
            for layer in LAYERS
            for compiled in (False, True)
        ],
        "tutorial": [
            case
            for case in tutorial(tutorials_dtype, options.seeds[0], options.tokens)
            if case.block or case.backend in backends
        ],
        "profile": [profiled, replace(profiled, compiled=True)],
    }
    return [case for part in parts for case in cases[part]]


def tutorial(dtype: str, seed: int, tokens: int | None) -> list[Case]:
    """Return the shapes of PyTorch's tutorial on scaled dot product attention, in eval mode and so without a mask.

    With `tokens` a batch has as many texts as that makes, and no figure of the tutorial's, whose batches have 32.
    """
    published = {"auto": None, "math": 19_254, "flash": 2_263, "efficient": 4_143, "cudnn": None}
    texts = {length: max(tokens // length, 1) if tokens else 32 for length in (256, 512, 1024)}
    kernel = Case("tutorial", dtype, texts[1024], 1024, 32, 32, causal=False)
    block = Case("tutorial", dtype, texts[512], 512, 8, 64, True, causal=False, bias=False, dropout=0.1)
    short = replace(block, batch=texts[256], length=256)
    cases = [
        *(replace(kernel, backend=name, tutorial_us=us) for name, us in published.items()),
        replace(block, tutorial_us=939),
        replace(block, lengths=tutorials_lengths(block.batch, block.length, seed), tutorial_us=560),
        replace(short, tutorial_us=407.8),
        replace(short, compiled=True, tutorial_us=521.2),
    ]
    return [replace(case, tutorial_us=None) for case in cases] if tokens else cases


def half_padded(batch: int, length: int) -> tuple[int, ...]:
    """Return lengths evenly from 1 to `length`, so that half of the batch is padding; half of it for a single text."""
    if batch == 1:
        return (-(-length // 2),)
    return tuple(round(1 + (length - 1) * i / (batch - 1)) for i in range(batch))


def tutorials_lengths(batch: int, length: int, seed: int) -> tuple[int, ...]:
    """Draw lengths as the tutorial does: length · (1 - N(0.5, 0.01)), and one of full length."""
    generator = random.Random(seed)
    lengths = [int(length * (1 - generator.gauss(0.5, 0.01))) for _ in range(batch)]
    lengths[generator.randrange(batch)] = length
    return tuple(lengths)
