"""The cache of a teacher for some students: what is stored of texts follows from their methods."""

from collections.abc import Callable, Mapping
from pathlib import Path

from torch import nn

from apprentice.errors import BadInput
from lit_modules.nets import Ensemble
from lit_modules.nets.batch_norm import has_no_running_statistics
from lit_modules.nets.stored import StoredTeacher
from lit_modules.objectives import Objective
from lit_modules.stored_teacher.forms import Form, Stored
from lit_modules.stored_teacher.store import TextStore
from lit_modules.teacher import TeacherCache


def make_cache(
    teacher: nn.Module, objectives: Mapping[str, Objective], classes: int, tell: Callable[[str], object], max_mb: int,
    folder: str | Path | None, stored: Stored | None,
) -> TeacherCache | TextStore:  # fmt: skip
    """Make it; BadInput for flags that can't be used, or a teacher that can't be stored."""
    if stored is None:
        if isinstance(teacher, StoredTeacher):
            raise BadInput("teacher", type(teacher).__name__, "what was stored of it beside it")
        return TeacherCache(teacher, max_mb, folder, tell)
    if folder is None:
        raise BadInput("teacher_top_k", stored.top_k, "--teacher_cache_dir DIR beside it, where outputs are kept")
    depends = any(map(has_no_running_statistics, teacher.modules()))
    if isinstance(teacher, Ensemble) or depends:
        why = "depend on the batch, by its statistics" if depends else "are the mean of several, which is not stored"
        raise BadInput("teacher_top_k", stored.top_k, f"a teacher whose outputs can be stored; this one's {why}")
    return TextStore(teacher, folder, form_of(stored, objectives, classes), classes, stored.source, tell)


def form_of(stored: Stored, objectives: Mapping[str, Objective], classes: int) -> Form:
    """Return the form of what is stored for these methods and V classes."""
    temperatures = {t for objective in objectives.values() if objective.uses_teacher for t in objective.temperatures}
    return Form.of(stored, {*temperatures, *stored.temperatures}, classes)
