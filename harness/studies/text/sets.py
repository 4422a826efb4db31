"""The data sets of language models."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from apprentice.errors import BadInput
from harness import cli
from harness.studies.choices import has_tokens


@dataclass(frozen=True)
class TextSets(cli.Classes):
    """Data sets to choose from: those whose samples are texts."""

    def offers(self, chosen: Any) -> bool:
        return super().offers(chosen) and has_tokens(chosen)

    def find(self, name: Any, key: str) -> tuple[type | str | bool | None, Mapping[str, Any]]:
        """Find a class by name or import path; BadInput for one of other samples."""
        chosen, sets = super().find(name, key)
        if not has_tokens(chosen):
            raise BadInput(key, name, f"texts, with a label for each token: {self.expected(name)}")
        return chosen, sets
