"""Tiny Shakespeare: whose line is it?"""

from collections import Counter
from pathlib import Path
from typing import Any

from apprentice.errors import BadInput
from datamodules.text.labelled_text import TEST_EVERY, LabelledText, Line


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
