"""Names of a comparison's arms: each method of `variants` for each net of `students`, as `only` picks them."""

import re
from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from torch import nn

from apprentice.errors import BadInput
from harness.cli.declarations import Names
from harness.cli.messages import near

T = TypeVar("T")
RESERVED = "teacher, students, checkpoints and attributes of torch's ModuleDict"  # names that no arm may have
STUDENT, STUDENTS, VARIANTS = "student", "students", "variants"  # keys of the command line


class ArmName(NamedTuple):
    """The name of an arm, a net that learns by a method, by those of both."""

    variant: str
    student: str | None = None  # its name in `students`

    @property
    def name(self) -> str:
        """Its name in the table, in results.json and of its folder."""
        return "-".join(filter(None, (self.student, self.variant)))

    @property
    def net(self) -> str:
        """Where its net is chosen on the command line."""
        return f"{STUDENTS}.{self.student}" if self.student else STUDENT


def is_reserved(name: str) -> bool:
    """Return whether a fit, a folder or an attribute of torch's ModuleDict has this name."""
    return bool(re.fullmatch(r"teacher(-.*)?|students(-\d+)?|checkpoints", name)) or hasattr(nn.ModuleDict(), name)


def pick(variants: Mapping[str, T], only: Sequence[str] | None, flag: str = "only") -> dict[str, T]:
    """Pick the variants of `only` in their own order; all if it is None, BadInput for an unknown name or none."""
    if only and not variants:
        raise BadInput(flag, only[0], f"`{VARIANTS}.NAME CLASS` beside it, of which there is none")
    for name in only or ():
        if name not in variants:
            apart = f"; near: {name.replace(',', ' ')}" if "," in name else near(name, variants)
            raise BadInput(flag, name, f"names among {', '.join(variants)}{apart}")
    if only is not None and not only:
        raise BadInput(flag, "[]", f"at least one of {', '.join(variants)}")
    return {name: variant for name, variant in variants.items() if only is None or name in only}


def arm_names(config: Namespace) -> dict[str, ArmName]:
    """Return the arms of `only` by name; with `students`, a variant's name stands for all of its arms.

    Raises:
        BadInput: two arms have one name, or `only` has a name that is neither an arm's nor a variant's.
    """
    settings = vars(config)
    students, variants = settings.get(STUDENTS) or {}, settings.get(VARIANTS) or {}
    by_name: dict[str, ArmName] = {}
    for arm in (ArmName(variant, student) for student in students or [None] for variant in variants):
        if arm.name in by_name:
            other = by_name[arm.name].net
            expected = f"a name that gives no row the name of another; {arm.name} is also one of {other}"
            raise BadInput(arm.net, students[arm.student].name, expected)
        by_name[arm.name] = arm
    names = dict.fromkeys([*by_name, *(variants if students else ())])
    named = set(pick(names, settings.get("only")))
    variants_named = named - {*by_name} if students else set()
    return {name: arm for name, arm in by_name.items() if name in named or arm.variant in variants_named}


def list_used(config: Namespace, key: str) -> list[str]:
    """List the names of the choices at a key that the arms of `only` use; all names where arms don't choose."""
    if key not in {STUDENTS, VARIANTS}:
        return list(vars(config)[key])
    names = (arm.student if key == STUDENTS else arm.variant for arm in arm_names(config).values())
    return list(dict.fromkeys(name for name in names if name is not None))


def choice_at(config: Namespace, key: str) -> Any:
    """Return the choice at a key, which may be one of several by names: `students.small`."""
    first, _, name = key.partition(".")
    return vars(config)[first][name] if name else vars(config)[first]


NAMES = Names(is_reserved, RESERVED, list_used)
