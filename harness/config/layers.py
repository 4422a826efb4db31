"""Settings from several places, the later ones first in rank, and messages that say what was given where."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from apprentice.errors import BadInput
from harness.config.settings import flat
from harness.config.sources import load


class Layer(NamedTuple):
    """Settings from one place; later layers override earlier ones."""

    given: dict[str, Any]
    source: str = ""


def layers_of(given: dict[str, Any]) -> list[Layer]:
    """Files in their order, then the flags."""
    return [*(Layer(load(path), str(path)) for path in given.pop("config", [])), Layer(given)]


class Told(BadInput):
    """Bad input that is shown as it was given."""


@contextmanager
def as_given(layers: Sequence[Layer]) -> Iterator[None]:
    """Errors show the value as it was given, and the file that it was given in."""
    try:
        yield
    except Told:
        raise
    except BadInput as error:
        value, source = error.value, layers[0].source if len(layers) == 1 else ""
        for layer in layers:
            found = dict(flat(layer.given))
            if error.flag in found:
                value, source = found[error.flag], layer.source
        place = f" (in {source})" if source else ""
        shown = " ".join(map(str, value)) if isinstance(value, list) and not place else value
        raise Told(error.flag, "''" if shown == "" else shown, f"{error.expected}{place}") from error
