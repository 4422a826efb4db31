"""Labelled lines of text: which class is a line from?"""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from apprentice.errors import BadInput
from datamodules.base import InMemoryData
from datamodules.splits import Split

Line = tuple[str, bytes]  # a label, and the text

TEST_EVERY = 10


class LabelledText(InMemoryData):
    """Lines of text with a label each; tokens are the bytes of UTF-8, so English letters, and 0 fills up.

    Every tenth line of a class tests, so classes have in testing the shares that they have; that split is fixed and
    depends on no seed. A line may occur more than once, in training and testing, too.

    Args:
        root: a file of lines `label<TAB>text`, or a folder with a file `<label>.txt` of lines for each label.
        length: tokens of a sample; what is longer is cut off.
        options: those of InMemoryData.

    Raises:
        BadInput: `root` is not as described, or a class has fewer than ten lines.
    """

    def __init__(self, root: str | Path = "data", length: int = 64, **options: Any) -> None:
        super().__init__(**options)
        if length < 1:
            raise BadInput("data.length", length, "at least 1 token")
        self.root, self.length, self.input_shape = Path(root).expanduser(), length, (length,)

    def lines(self) -> list[Line]:
        """All lines that have text, with their labels.

        Raises:
            BadInput: `root` is not as described.
        """
        if self.root.is_dir():
            files = sorted(self.root.glob("*.txt"))
            return [(file.stem, text) for file in files for text in file.read_bytes().splitlines() if text.strip()]
        if not self.root.is_file():
            raise BadInput("data.root", self.root, "a file of lines `label<TAB>text`, or a folder of <label>.txt")
        found = []
        for number, line in enumerate(self.root.read_bytes().splitlines(), 1):
            label, tab, text = line.partition(b"\t")
            if line.strip() and not (tab and label.strip() and text.strip()):
                raise BadInput("data.root", self.root, f"lines `label<TAB>text`; line {number} is another")
            if tab:
                found.append((label.decode(errors="replace").strip(), text))
        return found

    def read(self) -> tuple[Split, Split]:
        """Both sets; classes in the order of their names."""
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
        whole = Split(tokens((text for _, text in lines), self.length), labels)
        tested = torch.zeros(len(labels), dtype=torch.bool)
        for number in numbers.values():
            tested[(labels == number).nonzero().flatten()[TEST_EVERY - 1 :: TEST_EVERY]] = True
        return whole.take((~tested).nonzero().flatten()), whole.take(tested.nonzero().flatten())

    def normalize(self, inputs: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Stored tokens (B, T) uint8 as embeddings take them: int64, whatever the module's type."""
        return inputs.long()


def tokens(texts: Iterable[bytes], length: int) -> Tensor:
    """(n, length) uint8, the texts' bytes, cut off or filled up with 0."""
    rows = b"".join(text[:length].ljust(length, b"\0") for text in texts)
    return torch.frombuffer(bytearray(rows), dtype=torch.uint8).view(-1, length)


class Shakespeare(LabelledText):
    """Whose line is it? The speakers with the most lines in tiny Shakespeare (40,000 lines, Karpathy 2015).

    Args:
        root: the file, or a folder with `tinyshakespeare/input.txt`; nothing is downloaded.
        speakers: how many of them; Gloucester, who says the most, has 902 lines.
        length: tokens of a sample; what is longer is cut off.
        options: those of InMemoryData.

    Raises:
        BadInput: the file is not there or holds no plays, or there are not so many speakers of ten lines or more.
    """

    free_options = LabelledText.free_options | {"root"}

    def __init__(self, root: str | Path = "data", speakers: int = 8, length: int = 64, **options: Any) -> None:
        super().__init__(root, length, **options)
        self.speakers = speakers

    def lines(self) -> list[Line]:
        """The chosen speakers' lines, in the order of the plays."""
        said = _speeches(self._file())
        counts = Counter(speaker for speaker, _ in said)
        known = [name for name, count in counts.most_common() if count >= TEST_EVERY]
        if not 2 <= self.speakers <= len(known):
            expected = f"2 to {len(known)}, the speakers of at least {TEST_EVERY} lines"
            raise BadInput("data.speakers", self.speakers, expected)
        return [line for line in said if line[0] in set(known[: self.speakers])]

    def _file(self) -> Path:
        file = self.root if self.root.is_file() else self.root / "tinyshakespeare" / "input.txt"
        if not file.is_file():
            raise BadInput("data.root", self.root, f"tiny Shakespeare; {file} is not there")
        return file


def _speeches(file: Path) -> list[Line]:
    """Speakers and lines of plays: after an empty line there is `ShardLogger:`, below it what is said."""
    found: list[Line] = []
    for speech in file.read_bytes().replace(b"\r\n", b"\n").split(b"\n\n"):
        name, *lines = speech.strip().split(b"\n")
        if name.endswith(b":"):
            found += [(name[:-1].decode(errors="replace"), line) for line in lines if line.strip()]
    return found
