"""The file of a teacher's outputs: a header, where each sample's entries begin, and an entry for each response token.

    8 bytes   APTEACH and a zero
    u4 x 4    version; bytes of the header; CRC-32 of header, starts and blocks; 1 once all is written
    header    JSON
    starts    i8 (samples + 1), entries before each sample
    blocks    u4 (blocks, 2): CRC-32 of the entries of so many samples, and 1 once they are written
    entries   of a type that the header tells, one after the other, in the order of samples and their tokens

All is little-endian. Ranks write blocks, each of its own, into FILE.part, which becomes FILE when the last is there: a
killed run leaves blocks that the next one keeps.
"""

import fcntl
import json
import os
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from apprentice.errors import BadInput, reason

MAGIC, VERSION = b"APTEACH\0", 1
PREFIX = struct.Struct("<8sIIII")
FLAG = "teacher_cache_dir"


class Layout:
    """Where things are in a file: from its header and where each sample's entries begin."""

    def __init__(self, header: Mapping[str, Any], starts: np.ndarray) -> None:
        self.header, self.starts = dict(header), starts.astype("<i8")
        self.record = np.dtype([(name, kind, tuple(shape)) for name, kind, shape in header["record"]])
        self.text = json.dumps(self.header, sort_keys=True).encode()
        self.rows = int(header["block"])  # samples of a block
        self.blocks = -(-(len(starts) - 1) // self.rows)
        self.table = PREFIX.size + len(self.text) + self.starts.nbytes
        self.entries = -(-(self.table + 8 * self.blocks) // 64) * 64
        self.size = self.entries + int(starts[-1]) * self.record.itemsize

    def prefix(self, table: np.ndarray, is_whole: bool) -> bytes:
        crc = zlib.crc32(table.tobytes(), zlib.crc32(self.starts.tobytes(), zlib.crc32(self.text)))
        return PREFIX.pack(MAGIC, VERSION, len(self.text), crc if is_whole else 0, int(is_whole))

    def begin(self) -> bytes:
        """Return what an unfinished file begins with."""
        return self.prefix(np.zeros(0, "<u4"), False) + self.text + self.starts.tobytes()

    def bounds(self, block: int) -> tuple[int, int]:
        """Return where a block's entries begin and end, in bytes."""
        first, last = self.starts[[block * self.rows, min((block + 1) * self.rows, len(self.starts) - 1)]].tolist()
        return self.entries + first * self.record.itemsize, self.entries + last * self.record.itemsize

    def read_table(self, file: BinaryIO) -> np.ndarray:
        file.seek(self.table)
        return np.frombuffer(file.read(8 * self.blocks), "<u4").reshape(-1, 2)

    def is_intact(self, file: BinaryIO, block: int, table: np.ndarray) -> bool:
        """Return whether a block is written, with the entries of its checksum."""
        start, stop = self.bounds(block)
        file.seek(start)
        return bool(table[block, 1] == 1 and zlib.crc32(file.read(stop - start)) == table[block, 0])


@contextmanager
def locked(path: Path, tell: Callable[[str], object]) -> Iterator[None]:
    """Make a file, if there is none, and wait until no other run of this machine writes it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            tell(f"waits for another run, which writes {path}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


class Part:
    """A file that is being written, by any number of ranks at the same time."""

    def __init__(self, path: Path, layout: Layout) -> None:
        self.path, self.layout = path, layout

    def prepare(self) -> None:
        """Make the file, unless there is one for the same header and starts; by one rank, before others open it."""
        begin = self.layout.begin()
        with self.path.open("rb") as file:  # its first bytes may already be those of a whole file
            same = file.read(len(begin))[PREFIX.size :] == begin[PREFIX.size :]
            if same and self.path.stat().st_size == self.layout.size:
                return
        with self.path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, self.layout.size)  # or a full disk would be noticed at the end
            file.write(begin)

    def written(self) -> list[bool]:
        """Return of each block whether it is there, with the entries of its checksum."""
        with self.path.open("rb") as file:
            table = self.layout.read_table(file)
            return [self.layout.is_intact(file, block, table) for block in range(self.layout.blocks)]

    def write(self, block: int, entries: np.ndarray) -> None:
        content, (start, stop) = entries.tobytes(), self.layout.bounds(block)
        assert len(content) == stop - start
        with self.path.open("r+b", buffering=0) as file:
            os.pwrite(file.fileno(), content, start)
            os.pwrite(file.fileno(), struct.pack("<II", zlib.crc32(content), 1), self.layout.table + 8 * block)

    def finish(self, path: Path) -> None:
        """Turn it into the whole file; by one rank, after all blocks are written."""
        with self.path.open("r+b", buffering=0) as file:
            table = self.layout.read_table(file)
            assert table[:, 1].all()
            os.pwrite(file.fileno(), self.layout.prefix(table, True), 0)
            os.fsync(file.fileno())
        self.path.replace(path)


def read_layout(path: Path, expected: Mapping[str, Any]) -> Layout:
    """Read a whole file's header; BadInput for another format, damage, or a header that differs from `expected`."""
    try:
        with path.open("rb") as file:
            magic, version, size, crc, is_whole = PREFIX.unpack(file.read(PREFIX.size))
            if magic != MAGIC:
                raise BadInput(FLAG, path, "a file of a teacher's outputs; it is another kind of file")
            if version != VERSION:
                raise BadInput(FLAG, path, f"version {VERSION} of its format, which this one writes; it has {version}")
            text = file.read(size)
            header = json.loads(text)
            starts = np.frombuffer(file.read(8 * (header["samples"] + 1)), "<i8")
            layout = Layout(header, starts)
            whole = layout.prefix(layout.read_table(file), True)
    except (OSError, ValueError, LookupError, TypeError, struct.error) as error:
        raise BadInput(FLAG, path, f"a file of a teacher's outputs; it is damaged ({reason(error)})") from None
    if not is_whole or whole != PREFIX.pack(magic, version, size, crc, is_whole) or layout.text != text:
        raise BadInput(FLAG, path, "a file of a teacher's outputs; it is damaged in its header")
    for name, value in expected.items():
        if header[name] != value:
            what = {"data": "other texts or labels", "teacher": "another teacher"}.get(name, f"{name} {header[name]}")
            raise BadInput(FLAG, path, f"the outputs of this teacher for these texts; it has those of {what}")
    if (size := path.stat().st_size) != layout.size:
        raise BadInput(FLAG, path, f"a file of {layout.size:,} bytes; it has {size:,}")
    return layout


def check_blocks(path: Path, layout: Layout, blocks: Iterable[int]) -> bool:
    """Return whether these blocks have the entries of their checksums."""
    with path.open("rb") as file:
        table = layout.read_table(file)
        return all(layout.is_intact(file, block, table) for block in blocks)
