"""Prompts and responses from the documentation that Python carries with it."""

import builtins
import hashlib
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from datamodules.conversations import Row

# The builtins come first; of equal sentences the first counts.
MODULES = (
    "array", "bisect", "calendar", "cmath", "collections", "contextlib", "csv", "datetime", "difflib", "fractions",
    "functools", "heapq", "itertools", "json", "math", "operator", "queue", "random", "re", "shutil", "statistics",
    "string", "textwrap",
)  # fmt: skip
SENTENCE = re.compile(r"([A-Z].*?[.!?])(?= |$)")
SHORTEST, LONGEST = 15, 120  # characters of a sentence


@dataclass(frozen=True)
class PythonHelp:
    """`What does str.split do?`, and the first sentence of what Python itself says of it.

    The names are those of the builtins and of some modules of the standard library, with the methods of their classes.
    Each sentence occurs once, so none that is tested on was learned. Python's versions differ in some names and
    sentences (3.11 has 738 sentences), and `python -OO` drops those of modules that are written in Python.
    """

    flag = "data.path"  # whose default it is
    folder = None

    def key(self) -> str:
        """Return what determines the rows."""
        return hashlib.blake2b(repr([row for _, row in self.rows()]).encode(), digest_size=16).hexdigest()

    def rows(self) -> Iterator[Row]:
        """Yield a prompt and a response for each sentence."""
        sentences = set[str]()
        for name, documented in _documented():
            sentence = _first_sentence(documented)
            if sentence is not None and sentence not in sentences:
                sentences.add(sentence)
                prompt = f"What does {name} do?" if inspect.isroutine(documented) else f"What is {name}?"
                yield name, {"prompt": prompt, "response": sentence}

    def __str__(self) -> str:
        return "Python's documentation"


def _documented() -> Iterator[tuple[str, Any]]:
    """Yield functions and classes with their names, each class followed by its methods and properties."""
    for module in (builtins, *map(importlib.import_module, MODULES)):
        prefix = "" if module is builtins else f"{module.__name__}."
        for name in sorted(getattr(module, "__all__", vars(module))):
            documented = getattr(module, name, None)
            if name.startswith("_") or not callable(documented) or not _is_of_python(documented):
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
        found = SENTENCE.match(" ".join(paragraph.split()))
        if found is not None:
            is_fit = found[1].isascii() and SHORTEST <= len(found[1]) <= LONGEST
            return found[1] if is_fit else None
    return None
