"""Which rows there are: a backend, an operation, a group and a size each."""

from collections.abc import Sequence
from dataclasses import dataclass

from harness import config
from harness.studies.comm.operations import ITEM, OPERATIONS, Operation

WORLD, SUB = "world", "sub-group"


@dataclass(frozen=True)
class Backend:
    """One of torch's.

    Attributes:
        name: torch's.
        device: kind of those on which tensors are.
        only_all_reduce: whether it differs from another one in nothing else.
    """

    name: str
    device: str = "cpu"
    only_all_reduce: bool = False


@dataclass(frozen=True)
class Row:
    """One of the table.

    Attributes:
        backend: which carries it.
        operation: its name.
        group: "world" or "sub-group".
        ranks: of the group, by their numbers in the world.
        count: numbers in the largest buffer; 0 where nothing is sent.
    """

    backend: Backend
    operation: str
    group: str
    ranks: tuple[int, ...]
    count: int

    @property
    def of(self) -> Operation:
        """What is measured."""
        return OPERATIONS[self.operation]

    @property
    def size(self) -> int:
        """Bytes of that buffer."""
        return ITEM * self.count

    @property
    def name(self) -> str:
        """Its own among the rows."""
        size = f", {self.size:,} B" if self.count else ""
        return f"{self.backend.name} {self.operation}, {self.group}{size}"


class Rows:
    """All rows for a number of ranks.

    Args:
        world_size: ranks, at least 2.
        backends: in the order of the table.
        operations: names of those that are wanted; None for all.
        sizes: bytes, of which each buffer has at least as many as make whole numbers for every rank.

    Raises:
        BadInput: an operation is unknown.
    """

    def __init__(
        self, world_size: int, backends: Sequence[Backend], operations: Sequence[str] | None, sizes: Sequence[int]
    ) -> None:
        self.world_size, self.backends, self.sizes = world_size, backends, sizes
        self.operations = list(config.pick(OPERATIONS, operations))
        # With two ranks it is a second group of both: other connections, the same work.
        self.groups = {WORLD: tuple(range(world_size)), SUB: tuple(range(max(2, world_size - 1)))}

    def of(self, backend: Backend) -> list[Row]:
        """Those of one backend, in their order."""
        return [
            Row(backend, name, group, ranks, count)
            for name in self.operations
            for group, ranks in self.groups.items()
            for count in self._counts(name, len(ranks))
            if OPERATIONS[name].reduces_all or not backend.only_all_reduce
        ]

    def all(self) -> list[Row]:
        """Those of all backends."""
        return [row for backend in self.backends for row in self.of(backend)]

    def _counts(self, name: str, ranks: int) -> list[int]:
        """Numbers in a buffer: as many as the size asks for, and none left over by any rank."""
        if not OPERATIONS[name].sized:
            return [0]
        return list(dict.fromkeys(-(-size // (ITEM * ranks)) * ranks for size in self.sizes))


def words(size: int) -> str:
    """`1 KB`, `64 MB`, `1032 B`: in powers of 1024."""
    for unit, name in ((2**20, "MB"), (2**10, "KB")):
        if size >= unit and size % unit < unit / 100:
            return f"{size // unit} {name}"
    return f"{size} B"
