"""The cases of the study, each a backend, an operation, a group and a size; and the options that choose them."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from apprentice.errors import BadInput
from harness import cli
from harness.runs.arm_names import pick
from harness.runs.options import OneSeedOptions
from lab.studies.comm.operations import ITEM, OPERATIONS, Operation
from strategies.base.data_parallel import LONGEST

WORLD, SUB = "world", "sub-group"
QUICK = {"sizes": [2**10, 2**16], "repeats": 2}
LARGEST = 2**32  # bytes: a rank has a few buffers of each size


@dataclass
class Options(OneSeedOptions):
    """Options of the study."""

    sizes: list[int] = cli.option(lambda: [2**power for power in range(10, 27, 2)], on_resume=cli.GROWS)
    """bytes of the largest buffer, as nccl-tests count them."""
    repeats: int = cli.option(7, cli.Limit(lambda value: value >= 1, "at least 1"))
    """blocks of calls that are timed; their median is reported."""
    only: list[str] | None = cli.option(None, on_resume=cli.GROWS)
    """measure just these operations, such as broadcast all_reduce_sum."""
    backends: list[str] | None = cli.option(None, on_resume=cli.GROWS)
    """just these, such as gloo ring; all that fit the devices when not given."""
    timeout: float = cli.option(
        120.0, cli.Limit(lambda value: 0 < value <= LONGEST, f"seconds, above 0, at most {LONGEST:g}")
    )
    """seconds a rank may keep the others waiting."""
    quick: bool = False
    """take two small sizes and fewer repeats, wherever none are given."""
    quick_values: ClassVar[Mapping[str, Any]] = QUICK
    idle: ClassVar[Collection[str]] = ("num_classes", "checkpoint_every")
    why_inexact: ClassVar[str] = "what is sent is checked to the bit in any case"

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = self.sizes
        if not sizes or len(set(sizes)) < len(sizes) or not all(1 <= size <= LARGEST for size in sizes):
            raise BadInput("sizes", sizes, f"bytes, from 1 to {LARGEST}, none of them twice")


@dataclass(frozen=True)
class Backend:
    """One of torch's backends by torch's name, and the kind of device of its tensors."""

    name: str
    device: str = "cpu"
    only_all_reduce: bool = False  # whether all other operations are another backend's


@dataclass(frozen=True)
class Case:
    """One thing to measure."""

    backend: Backend  # that carries it
    operation: str  # its name
    group: str  # "world" or "sub-group"
    ranks: tuple[int, ...]  # of the group, by their numbers in the world
    count: int  # numbers in the largest buffer; 0 where nothing is sent

    @property
    def definition(self) -> Operation:
        return OPERATIONS[self.operation]

    @property
    def size(self) -> int:
        """Return the bytes of the largest buffer."""
        return ITEM * self.count

    @property
    def name(self) -> str:
        """Return the row's name, such as `gloo broadcast, world, 1,024 B`."""
        size = f", {self.size:,} B" if self.count else ""
        return f"{self.backend.name} {self.operation}, {self.group}{size}"


def all_cases(
    world_size: int, backends: Sequence[Backend], operations: Sequence[str] | None, sizes: Sequence[int]
) -> list[Case]:
    """Return all cases for 2 ranks or more; a largest buffer has at least `sizes` bytes and as many for every rank."""
    # With two ranks the sub-group is a second group of both: other connections, the same work.
    groups = {WORLD: tuple(range(world_size)), SUB: tuple(range(max(2, world_size - 1)))}
    return [
        Case(backend, name, group, ranks, count)
        for backend in backends
        for name, operation in pick(OPERATIONS, operations).items()
        if operation.reduces_all or not backend.only_all_reduce
        for group, ranks in groups.items()
        for count in dict.fromkeys(-(-size // (ITEM * len(ranks))) * len(ranks) * operation.sends for size in sizes)
    ]
