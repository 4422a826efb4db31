"""Tensors that are computed once for many runs: what is kept of a teacher, in a folder for each key."""

import hashlib
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from apprentice import replicas
from apprentice.errors import BadInput, reason

FORMAT = 1
FLAG = "teacher_cache_dir"
FACTS, CHECKSUM = "facts.json", "crc32"
HASH = "[0-9a-f]" * 32
OLDER = f"teacher-{HASH}.pt", f"teacher-{HASH}.topk", f"generations-{HASH}/*.npz"  # what older versions have written
WORDS = 2**32


class TensorFolder:
    """A folder of files of tensors, with a page of facts, which is written when all files are there.

    The folder's name is a hash of what tells its tensors from others. Files are written whole or not at all, by any
    number of ranks, and have checksums: a killed run leaves some, which the next one keeps.

    Attributes:
        path: of the folder.

    Args:
        parent: of the folder; runs share it.
        kind: of tensors, with which the folder's name begins.
        facts: what tells these tensors from all others, as JSON has it.
    """

    def __init__(self, parent: Path, kind: str, facts: Mapping[str, Any]) -> None:
        text = json.dumps({"format": FORMAT, "kind": kind, **facts}, sort_keys=True)
        self.facts: dict[str, Any] = json.loads(text)
        self.path = parent / f"{kind}-{hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}"

    @property
    def is_whole(self) -> bool:
        """Whether all files were written."""
        return (self.path / FACTS).exists()

    def file(self, number: int) -> Path:
        return self.path / f"{number}.safetensors"

    def has(self, number: int, rows: int) -> bool:
        """Return whether a file is there, undamaged, with tensors of so many rows."""
        try:
            return self.file(number).exists() and all(len(x) == rows for x in self.read(number).values())
        except BadInput:
            return False

    def read(self, number: int) -> dict[str, Tensor]:
        """Map the tensors of a file into memory, on the CPU; BadInput for a damaged one."""
        path = self.file(number)
        try:
            with safe_open(path, "pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
                checksum = (file.metadata() or {}).get(CHECKSUM)
        except (OSError, SafetensorError) as error:
            raise BadInput(FLAG, path, f"a whole file of tensors; it is damaged ({reason(error)}): delete it") from None
        if checksum != _checksum(tensors):
            raise BadInput(FLAG, path, "a file whose tensors have its checksum; it is damaged: delete it")
        return tensors

    def write(self, number: int, tensors: Mapping[str, Tensor]) -> None:
        """Write a file; BadInput without a place for it."""
        path, local = self.file(number), {name: x.detach().cpu().contiguous() for name, x in tensors.items()}
        temporary = path.with_name(f".{path.name}.{os.getpid()}")  # another run may write the same
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            save_file(local, temporary, {CHECKSUM: _checksum(local)})
            temporary.replace(path)
        except (OSError, SafetensorError) as error:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise BadInput(FLAG, self.path.parent, f"a folder with space to write in; {reason(error)}") from None

    def finish(self, numbers: Iterable[int], facts: Mapping[str, Any]) -> None:
        """Say that all files are there, with more facts; by one rank. Remove those of a run that has cut otherwise."""
        names = {self.file(number).name for number in numbers}
        for path in self.path.glob("*.safetensors"):
            if path.name not in names:
                path.unlink()
        temporary = self.path / f".{FACTS}.{os.getpid()}"
        temporary.write_text(json.dumps({**self.facts, **facts}, indent=1, sort_keys=True) + "\n")
        temporary.replace(self.path / FACTS)

    def read_facts(self, expected: Mapping[str, Any]) -> dict[str, Any]:
        """Return the facts of a whole folder; BadInput for damaged ones, or others than its own and those expected."""
        path = self.path / FACTS
        try:
            facts: dict[str, Any] = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise BadInput(FLAG, path, f"a page of facts; it is damaged ({reason(error)}): delete the folder") from None
        if wrong := [name for name, value in {**self.facts, **expected}.items() if facts.get(name) != value]:
            known = facts.get(wrong[0])
            raise BadInput(FLAG, path, f"facts of this teacher and this data; their {wrong[0]} is {known}")
        return facts

    @contextmanager
    def locked(self, tell: Callable[[str], object]) -> Iterator[None]:
        """Make the folder, if there is none, and wait until no other run of this machine writes into it.

        Raises:
            BadInput: it can't be made.
        """
        lock = FileLock(self.path / ".lock")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock.acquire(timeout=0)
        except Timeout:
            tell(f"waits for another run, which writes {self.path}")
            lock.acquire()
        except OSError as error:
            raise BadInput(FLAG, self.path.parent, f"a folder to write in; {reason(error)}") from None
        try:
            yield
        finally:
            lock.release()

    def tell_of_older(self, tell: Callable[[str], object]) -> None:
        """Say so if there are files of older versions, which are not read."""
        if any(True for pattern in OLDER for _ in self.path.parent.glob(pattern)):
            tell(f"{self.path.parent} has files made by an older version; what this run needs is written again")


def _checksum(tensors: Mapping[str, Tensor]) -> str:
    crc = 0
    for name, x in sorted(tensors.items()):
        crc = zlib.crc32(repr((name, tuple(x.shape), x.dtype)).encode(), crc)
        crc = zlib.crc32(_bytes(x), crc)
    return f"{crc:08x}"


def _bytes(x: Tensor) -> memoryview:
    return x.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data


def hash_tensors(*tensors: Tensor, start: bytes = b"") -> int:
    """Return 64 bits of a hash of tensors with their shapes and types."""
    digest = hashlib.blake2b(start, digest_size=8)
    for x in tensors:
        digest.update(repr((tuple(x.shape), x.dtype)).encode())
        digest.update(_bytes(x))
    return int.from_bytes(digest.digest(), "little")


def add_hashes(*sums: int, device: torch.device) -> list[str]:
    """Return, in hexadecimal, the sums over all ranks of sums of 64-bit hashes; collective.

    They do not depend on who has hashed what, nor on the order.
    """
    halves = [half for total in sums for half in (total % WORDS, total // WORDS % WORDS)]
    added = replicas.all_reduce_sum_(torch.tensor(halves, device=device)).tolist()
    return [f"{(low + high * WORDS) % WORDS**2:016x}" for low, high in zip(added[::2], added[1::2], strict=True)]
