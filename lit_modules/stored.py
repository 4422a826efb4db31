"""What a teacher's stored outputs take, and for which students."""

from collections.abc import Mapping

from lit_modules.nets import Outputs
from lit_modules.objectives import Objective
from lit_modules.objectives.base import OWN

LEAST = 2**20  # bytes that are worth a line


def sizes(stored: Outputs, objectives: Mapping[str, Objective]) -> str:
    """The size of all outputs, and of features by the students that read them: `12.3 MiB; 3.4 for at, sp`.

    Empty if little is stored, or logits alone.
    """
    found: dict[tuple[str, ...], int] = {}
    for path, x in stored.features.items():
        names = tuple(name for name, objective in objectives.items() if _reads(name, objective, path, stored))
        found[names] = found.get(names, 0) + x.nbytes
    total = stored.logits.nbytes + sum(found.values())
    parts = [f"{size / 2**20:.1f} for {', '.join(names)}" for names, size in found.items()]
    return "; ".join([f"{total / 2**20:.1f} MiB", *parts]) if found and total >= LEAST else ""


def _reads(name: str, objective: Objective, path: str, stored: Outputs) -> bool:
    """Whether a student reads a feature: one that its objective condensed, or a raw one that it did not."""
    if OWN in path:
        return path.startswith(f"{name}{OWN}")
    raw = path in objective.teacher_layers.values() and f"{name}{OWN}{path}" not in stored.features
    return raw and objective.uses_teacher
