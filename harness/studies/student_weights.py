"""The weights with which a student begins: those of a run's net that embeds, before a new classifier."""

from pathlib import Path

from torch import nn

from apprentice.errors import BadInput
from apprentice.weights import check_weights
from harness.runs.nets import check_options, read_expects
from harness.runs.session import Session
from harness.studies.choices import check_expects, net_spec
from lit_modules.nets.embedder import Embedder, classifier_path
from lit_modules.nets.identity import Origin
from lit_modules.nets.weights import load_checked, match_names, read_weights

STUDENT_CKPT, STUDENTS = "student_ckpt", "students"


def load_student(session: Session, net: nn.Module, key: str, seed: int) -> None:
    """Load the weights of `student_ckpt.NAME` into the net chosen under `students.NAME`, if it has such.

    The path is that of a folder, as RUN/seed{seed}/cosine, or of its weights.pt. What the file lacks of the classifier
    stays new.

    Raises:
        BadInput: they don't fit, or have learnt from other images; or others are named for a student that is not.
    """
    _check_names(session)
    name = key.removeprefix(f"{STUDENTS}.")
    if name == key or name not in session.config.student_ckpt:
        return
    flag, path = f"{STUDENT_CKPT}.{name}", Path(str(session.config.student_ckpt[name]).replace("{seed}", str(seed)))
    file = path / "weights.pt" if path.is_dir() else path
    weights, state = read_weights(str(file), flag), net.state_dict()
    weights = match_names(net, weights, ("head.",))  # of `embed teacher`, which leads to the teacher's width
    new = "" if isinstance(net, Embedder) else f"{classifier_path(net)}."
    weights |= {name: x for name, x in state.items() if new and name.startswith(new) and name not in weights}
    check_weights(state, weights, str(file), flag, type(net).__name__)
    check_options(file, net_spec(session, key), key)
    check_expects(session.data, read_expects(file.parent), flag)
    load_checked(net, weights)
    if seed == session.config.seeds[0]:
        session.origins[flag] = Origin.of(net, has_weights=True)


def _check_names(session: Session) -> None:
    """Raise BadInput if weights are named for a student that is not."""
    names = vars(session.config).get(STUDENTS, {})
    for name, path in session.config.student_ckpt.items():
        if name not in names:
            listed = f"; there: {', '.join(names)}" if names else ""
            raise BadInput(f"{STUDENT_CKPT}.{name}", path, f"the name of a student, as `{STUDENTS}.{name}`{listed}")
