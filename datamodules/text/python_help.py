"""Prompts and responses from the documentation that Python carries with it."""

import builtins
import hashlib
import importlib
import inspect
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

import numpy as np

from datamodules.text.conversations import NamedRow

# The builtins come first; of equal sentences the first counts. Without `operator`, which says `Same as a + b.`
MODULES = (
    "array", "bisect", "calendar", "cmath", "collections", "contextlib", "csv", "datetime", "difflib", "fractions",
    "functools", "heapq", "itertools", "json", "math", "queue", "random", "re", "shutil", "statistics", "string",
    "textwrap",
)  # fmt: skip
REPLACED = {"input"}  # by shells such as Jupyter's, where the data would be others
SENTENCE = re.compile(r"([A-Z].*?[.!?])(?= |$)")
SHORTEST, LONGEST = 15, 120  # characters of a sentence
SIMILAR = 0.85  # difflib's ratio of sentences that say nearly the same; above 0.9 few words differ


@dataclass(frozen=True)
class PythonHelp:
    """`What does str.split do?`, and the first sentence of what Python itself says of it.

    The names are those of the builtins and of some modules of the standard library, with the methods of their classes.
    Each sentence occurs once, and a split parts no `groups`, so nothing that is tested on is nearly equal to what was
    learned. Python's versions differ in some names and sentences (3.11 has 700 sentences in 149 groups), and
    `python -OO` drops those of modules that are written in Python.
    """

    flag = "data.path"  # whose default it is
    folder = None

    def key(self) -> str:
        """Return what determines the rows."""
        return hashlib.blake2b(repr([SIMILAR, *self.rows()]).encode(), digest_size=16).hexdigest()

    def rows(self) -> Iterator[NamedRow]:
        """Yield a prompt and a response for each sentence."""
        sentences = set[str]()
        for name, documented in _list_documented():
            sentence = _first_sentence(documented)
            if sentence is not None and sentence not in sentences:
                sentences.add(sentence)
                prompt = f"What does {name} do?" if inspect.isroutine(documented) else f"What is {name}?"
                yield name, {"prompt": prompt, "response": sentence}

    def groups(self) -> dict[str, int]:
        """Number the group of each row, by its name.

        A group is all that is said of a class or a module, and of others with nearly equal sentences: `str`, `bytes`
        and `bytearray`, or `math` and `cmath`. Each builtin function is by itself, unless another says nearly the same.
        """
        names, rows = zip(*self.rows(), strict=True)
        objects = [name.rpartition(".")[0] or name for name in names]
        first = {name: place for place, name in reversed([*enumerate(objects)])}
        groups = np.array([first[name] for name in objects])  # each is the place of one of its rows
        for one, other in _similar_pairs([row["response"] for row in rows]):
            groups[groups == groups[other]] = groups[one]
        return dict(zip(names, groups.tolist(), strict=True))

    def __str__(self) -> str:
        return "Python's documentation"


def _similar_pairs(sentences: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Yield the places of each two ASCII sentences whose ratio is `SIMILAR` or more."""
    counts = np.stack([np.bincount(np.frombuffer(text.encode(), np.uint8), minlength=128) for text in sentences])
    lengths = counts.sum(1)
    for place, sentence in enumerate(sentences):
        matcher = SequenceMatcher(None, "", sentence, autojunk=False)
        bounds = 2 * np.minimum(counts[:place], counts[place]).sum(1) / (lengths[:place] + lengths[place])
        for earlier in np.flatnonzero(bounds >= SIMILAR).tolist():
            matcher.set_seq1(sentences[earlier])
            if matcher.ratio() >= SIMILAR:
                yield earlier, place


def _list_documented() -> Iterator[tuple[str, Any]]:
    """Yield functions and classes with their names, each class followed by its methods and properties."""
    for module in (builtins, *map(importlib.import_module, MODULES)):
        prefix = "" if module is builtins else f"{module.__name__}."
        for name in sorted(getattr(module, "__all__", vars(module))):
            documented = getattr(module, name, None)
            if name.startswith("_") or name in REPLACED or not callable(documented) or not _is_of_python(documented):
                continue
            yield prefix + name, documented
            if inspect.isclass(documented):
                for attribute, member in sorted(vars(documented).items()):
                    if not attribute.startswith("_"):
                        yield f"{prefix}{name}.{attribute}", getattr(member, "__func__", member)


def _is_of_python(documented: Any) -> bool:
    """Return whether the standard library has it; IPython, for one, adds functions to the builtins."""
    module = getattr(documented, "__module__", None)  # None of some that are written in C
    return module is None or module.partition(".")[0] in sys.stdlib_module_names


def _first_sentence(documented: Any) -> str | None:
    """Return the first sentence of a docstring in ASCII; None if there is none of some length.

    What a value says of its class, as an integer of `int`, is not its own. Signatures before the sentence are skipped.
    """
    text = documented.__doc__
    if not isinstance(text, str) or (not inspect.isclass(documented) and text == type(documented).__doc__):
        return None
    for paragraph in inspect.cleandoc(text).split("\n\n"):
        if match := SENTENCE.match(" ".join(paragraph.split())):
            sentence = match[1]
            return sentence if sentence.isascii() and SHORTEST <= len(sentence) <= LONGEST else None
    return None
