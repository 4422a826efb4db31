"""Lines of text to classify: those of a file or a folder, or of the speakers of tiny Shakespeare."""

from collections import Counter
from pathlib import Path
from typing import Any

import torch

from apprentice.errors import BadInput
from datamodules.classes import ClassData
from datamodules.preparation import Preparation
from datamodules.splits import Split, complement

Line = tuple[str, bytes]  # a label, and the text

TEST_EVERY = 10


class LabelledText(ClassData):
    """Lines of text with a label each; tokens are the bytes of UTF-8, and 0 is padding.

    Every tenth line of a class is for testing, so each class has the same share there; this split is fixed and depends
    on no seed. A line may occur more than once, also in both sets.

    Args:
        root: a file of lines `label<TAB>text`, or a folder with a file `<label>.txt` of lines for each label.
        length: tokens of a sample; longer lines are cut off.
        options: those of ClassData.

    Raises:
        BadInput: `root` is not as described, or a class has fewer than ten lines.
    """

    def __init__(self, root: str | Path = "data", length: int = 64, **options: Any) -> None:
        super().__init__(**options)
        if length < 1:
            raise BadInput("data.length", length, "at least 1 token")
        self.root, self.length, self.input_shape = Path(root).expanduser(), length, (length,)
        self._texts = dict[str, list[bytes]]()  # of the sets that parts are drawn from

    @property
    def preparation(self) -> Preparation:
        return Preparation(kind="bytes", shape=self.input_shape)

    def lines(self) -> list[Line]:
        """All lines that are not empty, with their labels."""
        if self.root.is_dir():
            files = sorted(file for file in self.root.glob("*.txt") if file.is_file())
            return [(file.stem, text) for file in files for text in file.read_bytes().splitlines() if text.strip()]
        if not self.root.is_file():
            raise BadInput("data.root", self.root, "a file of lines `label<TAB>text`, or a folder of <label>.txt")
        lines: list[Line] = []
        for number, line in enumerate(self.root.read_bytes().splitlines(), 1):
            label, tab, text = line.partition(b"\t")
            if line.strip() and not (tab and label.strip() and text.strip()):
                raise BadInput("data.root", self.root, f"lines `label<TAB>text`; line {number} is another")
            if tab:
                lines.append((label.decode(errors="replace").strip(), text))
        return lines

    def read(self) -> tuple[Split, Split]:
        """Both sets; classes are in the order of their names."""
        lines = self.lines()
        counts = Counter(label for label, _ in lines)
        self.class_names = tuple(sorted(counts))
        if len(counts) < 2:
            raise BadInput("data.root", self.root, f"lines of at least 2 classes; there are {len(counts)}")
        for name, count in counts.items():
            if count < TEST_EVERY:
                raise BadInput("data.root", self.root, f"at least {TEST_EVERY} lines of each class; {name} has {count}")
        numbers = {name: number for number, name in enumerate(self.class_names)}
        labels = torch.tensor([numbers[label] for label, _ in lines])
        rows = b"".join(text[: self.length].ljust(self.length, b"\0") for _, text in lines)
        whole = Split(torch.frombuffer(bytearray(rows), dtype=torch.uint8).view(-1, self.length), labels)
        classes = [(labels == number).nonzero().flatten() for number in numbers.values()]
        test = torch.cat([places[TEST_EVERY - 1 :: TEST_EVERY] for places in classes]).sort().values
        train = complement(test, len(labels))
        sets = {"train": train, "test": test}
        self._texts = {part: [lines[row][1] for row in rows.tolist()] for part, rows in sets.items()}
        return whole.take(train), whole.take(test)

    def names_of(self, part: str, kind: str) -> list[str] | None:
        if kind != "text":
            return None
        rows, source = self.rows_of(part).tolist(), self.source_of(part)
        return [self._texts[source][row].decode(errors="replace") for row in rows]


class Shakespeare(LabelledText):
    """Lines of the speakers with the most lines in tiny Shakespeare (40,000 lines, Karpathy 2015).

    Args:
        root: the file, or a folder with `tinyshakespeare/input.txt`; nothing is downloaded.
        speakers: number of speakers; Gloucester, who has the most lines, has 902.
        length: tokens of a sample; longer lines are cut off.
        options: those of InMemoryData.

    Raises:
        BadInput: the file is absent or holds no plays, or there are fewer speakers of ten lines or more.
    """

    free_options = LabelledText.free_options | {"root"}

    def __init__(self, root: str | Path = "data", speakers: int = 8, length: int = 64, **options: Any) -> None:
        super().__init__(root, length, **options)
        self.speakers = speakers

    def lines(self) -> list[Line]:
        """The chosen speakers' lines, in the order of the plays."""
        file = self.root if self.root.is_file() else self.root / "tinyshakespeare" / "input.txt"
        if not file.is_file():
            raise BadInput("data.root", self.root, f"tiny Shakespeare; {file} is not there")
        spoken: list[Line] = []
        for speech in file.read_bytes().replace(b"\r\n", b"\n").split(b"\n\n"):  # `Speaker:`, then lines
            name, *lines = speech.strip().split(b"\n")
            if name.endswith(b":"):
                spoken += [(name[:-1].decode(errors="replace"), line) for line in lines if line.strip()]
        counts = Counter(speaker for speaker, _ in spoken).most_common()
        known = [name for name, count in counts if count >= TEST_EVERY]
        if not 2 <= self.speakers <= len(known):
            expected = f"2 to {len(known)}, the speakers of at least {TEST_EVERY} lines"
            raise BadInput("data.speakers", self.speakers, expected)
        return [line for line in spoken if line[0] in set(known[: self.speakers])]
