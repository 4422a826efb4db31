"""The teachers of a student: `taught_by.ROW NAME`, or `taught_by.ROW.NAME WEIGHT` for each of several."""

import math
from argparse import Namespace
from collections.abc import Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Any

from apprentice.errors import BadInput
from harness.cli.messages import near
from harness.cli.sources import read_value
from harness.runs.arm_names import ArmName

TEACHER, TEACHERS = "teacher", "teachers"  # flags of the teacher and, by name, of others
TAUGHT_BY = "taught_by"
TeacherWeights = Mapping[str, float]  # by the flag that chooses a teacher, its weight
BY_TEACHER: TeacherWeights = MappingProxyType({TEACHER: 1.0})


def is_teacher(key: str) -> bool:
    """Return whether a flag chooses a teacher."""
    return key.partition(".")[0] in {TEACHER, TEACHERS}


def teacher_row_name(key: str) -> str:
    """Return the name of a teacher's row, fit and folder: `teacher`, or `teacher-big` of `teachers.big`."""
    return key.replace(f"{TEACHERS}.", f"{TEACHER}-")


def teachers_of(config: Namespace, rows: Mapping[str, ArmName]) -> dict[str, TeacherWeights]:
    """Return the teachers of each row, by default `teacher` alone; a method's name stands for its rows.

    Raises:
        BadInput: there is no such row, method or teacher, or a weight is not above 0.
    """
    named: dict[str, dict[str, float]] = {}
    whole = set[str]()  # names that have all their teachers in one value
    known = [TEACHER, *vars(config).get(TEACHERS, {})]
    names = dict.fromkeys([*rows, *(row.variant for row in rows.values())])
    for path, text in vars(config).get(TAUGHT_BY, {}).items():
        name, _, teacher = path.partition(".")
        flag, value = f"{TAUGHT_BY}.{path}", read_value(text, f"{TAUGHT_BY}.{path}")
        if name not in names:
            raise BadInput(flag, text, f"after `{TAUGHT_BY}` a name among {', '.join(names)}{near(name, names)}")
        shares = {teacher: value} if teacher else value if isinstance(value, dict) else {value: 1.0}
        for other, weight in shares.items():
            if other not in known:
                hint = f"teachers among {', '.join(known)}{near(str(other), known)}; `{TEACHERS}.NAME CLASS` adds one"
                raise BadInput(flag, text, hint)
            key = TEACHER if other == TEACHER else f"{TEACHERS}.{other}"
            named.setdefault(name, {})[key] = _check_weight(flag, weight)
        whole |= set() if teacher else {name}
        if name in whole and len(named[name]) > len(shares):
            raise BadInput(flag, text, f"either the weights of the teachers of {name}, or one teacher")
    return {name: named.get(name) or named.get(row.variant) or {**BY_TEACHER} for name, row in rows.items()}


def _check_weight(flag: str, weight: Any) -> float:
    with suppress(TypeError, ValueError):
        if 0 < float(weight) < math.inf:
            return float(weight)
    raise BadInput(flag, weight, "a weight above 0, or the name of one teacher")


def format_teachers(shares: TeacherWeights) -> str:
    """Say who teaches a row: `teacher-big`, or `0.7 teacher and 0.3 teacher-big`, shares of their mean."""
    if len(shares) == 1:
        return teacher_row_name(next(iter(shares)))
    total = math.fsum(shares.values())
    return " and ".join(f"{weight / total:.3g} {teacher_row_name(key)}" for key, weight in shares.items())
