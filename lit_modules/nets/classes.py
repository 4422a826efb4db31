"""Names of the classes of a net's logits, and the reordering of logits to the order of the data's classes."""

import re
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from apprentice.errors import BadInput
from apprentice.keyed import with_seed
from lit_modules.nets.base import cast_inputs, evaluating
from lit_modules.nets.ensemble import Ensemble
from lit_modules.nets.layers import heads

WORDNET = re.compile(r"n\d{8}")  # how folders of ImageNet's classes are called
SPELLED = 0.1  # share of names that may be spelled differently if all others are in their places
LISTED = 4
Names = Sequence[str]


class ClassOrder(NamedTuple):
    """For each class of the data its place in a net's logits, and a note for the user; "" for none."""

    places: list[int]
    note: str

    @property
    def moves(self) -> bool:
        """Whether logits change places."""
        return self.places != list(range(len(self.places)))


def classes_of(net: nn.Module) -> tuple[str, ...] | None:
    """Return the names of the classes of a net's weights, in order: its `class_names`, or a transformers model's.

    Empty if the classes have no names; None if there are no classes, as the weights, or those of the head, are new.
    """
    if (names := getattr(net, "class_names", None)) is not None:
        return tuple(map(str, names))
    labels = getattr(getattr(net, "config", None), "id2label", None)
    return label_names(labels) if isinstance(labels, dict) else None


def label_names(labels: dict[int, str]) -> tuple[str, ...]:
    """Return the names in a transformers configuration; () for LABEL_0 and so on, which stand for no names."""
    names = tuple(str(labels[number]) for number in sorted(labels, key=int))
    return () if names == tuple(f"LABEL_{number}" for number in range(len(names))) else names


def members_of(net: nn.Module) -> list[nn.Module]:
    """Return the nets that have classes: the net itself, or the members of an ensemble, perhaps of ensembles."""
    if not isinstance(net, Ensemble):
        return [net]
    return [inner for member in net.members.nets for inner in members_of(member)]


def check_classes(net: nn.Module, names: Names, flag: str) -> None:
    """Raise BadInput if a trained net has other classes than these names, or another order.

    Without names, members of an ensemble are compared with the first that names its classes.
    """
    name, members = type(net).__name__, members_of(net)
    reference = names or next((order for member in members if (order := classes_of(member))), ())
    for member in members:
        order = classes_of(member)
        if reference and order and class_order(order, reference, flag, name).moves:
            whose = "the data's" if names else "its first member's"
            expected = f"a net with {whose} order of classes ({_shorten(reference)}); reorder_classes changes it"
            raise BadInput(flag, name, f"{expected}; it has {_shorten(order)}")


def class_order(known: Names, wanted: Names, flag: str, value: object) -> ClassOrder:
    """Match the classes `known` to a net and the `wanted` classes of the data by name; return the order.

    Names match but for case, spaces and underscores; one may list synonyms behind commas. Where only one of both has
    real names, or both have names of different kinds, classes are matched in their order, with a note. BadInput if the
    net has other classes, or another number of them.
    """
    if not known:
        return ClassOrder([*range(len(wanted))], f"its weights name no classes: they are taken for {_shorten(wanted)}")
    if len(known) != len(wanted):
        raise BadInput(flag, value, f"a net of {len(wanted)} classes, as the data has; it has {len(known)}")
    ours, theirs = [_synonyms(name) for name in wanted], [_synonyms(name) for name in known]
    places = [_find_place(name, number, known, theirs) for number, name in enumerate(wanted)]
    if None not in places and len({*places}) == len(places):
        return ClassOrder([place for place in places if place is not None], "")
    order, lost = [*range(len(wanted))], [number for number, place in enumerate(places) if place is None]
    few = len(lost) <= SPELLED * len(wanted) and all(place in {None, number} for number, place in enumerate(places))
    if lost and (few or _kind(known) != _kind(wanted)):
        both = [_shorten([names[number] for number in lost]) for names in (known, wanted)]
        return ClassOrder(order, "its classes {} are taken for {}".format(*both))
    unknown = [name for name, names in zip(known, theirs, strict=True) if not any(names & other for other in ours)]
    fault = f"it has {unknown[0]}" if unknown else "several of its classes have one name"
    missing = f", and the data has {wanted[lost[0]]}" if lost else ""
    raise BadInput(flag, value, f"a net of the data's classes; {fault}{missing}")


def reorder_classes(net: nn.Module, places: Sequence[int], example: Tensor, flag: str = "net") -> None:
    """Permute the rows of a net's head: logit i becomes what logit places[i] was. `example` (b, ...) holds inputs.

    BadInput if the net does not end in a linear layer (`heads`), or does more with its logits.
    """
    if example.is_floating_point():  # zeros may hide what the head does
        example = with_seed(0, lambda: torch.rand_like(example))
    inputs = cast_inputs(net, example)
    with evaluating(net):
        before = net(inputs)
        for head in heads(net, flag):
            for parameter in head.parameters():
                parameter.copy_(parameter[torch.tensor(places, device=parameter.device)])
        after = net(inputs)
    if not torch.allclose(after, before[..., places], 1e-3, 1e-4):
        expected = "a net whose last layer gives its logits; their order can't be changed"
        raise BadInput(flag, type(net).__name__, expected)


def _synonyms(name: str) -> set[str]:
    plain = " ".join(name.casefold().replace("_", " ").replace("-", " ").split())
    return {part.strip() for part in plain.split(",")} | {plain.replace(",", "")}


def _find_place(name: str, number: int, known: Names, theirs: Sequence[set[str]]) -> int | None:
    """Find a class by its exact name, or a synonym at the same place, or the only synonym."""
    if known.count(name) == 1:
        return known.index(name)
    names = _synonyms(name)
    if names & theirs[number]:
        return number
    places = [place for place, other in enumerate(theirs) if names & other]
    return places[0] if len(places) == 1 else None


def are_named(names: Names) -> bool:
    """Return whether names are more than numbers that count classes."""
    return list(names) != [str(number) for number in range(len(names))]


def _kind(names: Names) -> str:
    """Return what names are: numbers that count them, WordNet's numbers, or words."""
    if not are_named(names):
        return "numbers"
    return "WordNet" if all(map(WORDNET.fullmatch, names)) else "words"


def _shorten(names: Names) -> str:
    more = len(names) - LISTED
    return "; ".join(names[:LISTED]) + f" and {more} more" * (more > 0)
