"""The teacher of a comparison: whether and how long it is trained, the weights that it is loaded from."""

from pathlib import Path
from typing import Any

from torch import nn

from apprentice.errors import BadInput
from harness.runs.arm_names import choice_at
from harness.runs.nets import check_options, read_classes, read_expects
from harness.runs.quiet import notice
from harness.runs.records import FitRecord
from harness.runs.session import Session
from harness.runs.teacher_weights import TEACHER, teacher_row_name
from harness.studies.choices import check_expects, match_classes, net_spec
from lit_modules.nets.base import Net
from lit_modules.nets.identity import Origin
from lit_modules.nets.weights import load_weights


def has_trained_teacher(session: Session, key: str = TEACHER) -> bool:
    """Return whether the teacher chosen under a key is loaded, not trained."""
    return (_is_loaded(session, key) and not session.config.teacher_epochs) or _declarations(session, key).is_trained


def _is_loaded(session: Session, key: str) -> bool:
    """Return whether the teacher chosen under a key begins with trained weights."""
    brings_weights = choice_at(session.config, key).init_args.get(_declarations(session, key).trained_if, False)
    return bool((session.config.teacher_ckpt is not None and key == TEACHER) or brings_weights)


def check_head_only(session: Session) -> None:
    """Raise BadInput if the teacher's head alone is to be trained and the rest is new, or nothing is trained."""
    chosen = session.config.teacher
    brings_weights = any(
        chosen.init_args.get(name) != value for name, value in _declarations(session).untrained.items()
    )
    is_loaded = brings_weights or session.config.teacher_ckpt is not None
    if session.config.teacher_head_only and (not is_loaded or has_trained_teacher(session)):
        expected = "`teacher_ckpt FILE` and `teacher_epochs N` beside it, or a teacher with `teacher.weights`"
        raise BadInput("teacher_head_only", "true", expected)


def check_own_settings(session: Session) -> None:
    """Raise BadInput for settings of a teacher's training where it is loaded, or its data make their own batches.

    A recipe's settings of a teacher that is loaded are dropped.
    """
    config = session.config
    if (
        _is_loaded(session, TEACHER)
        and not config.teacher_ckpt_partial
        and not session.parser.is_given("teacher_epochs")
    ):
        config.teacher_epochs = None
    for name in ("optimizer", "scheduler", "batch_size"):
        option = f"{TEACHER}_{name}"
        value = vars(config)[option]
        if value is None or not has_trained_teacher(session):
            continue
        if session.parser.is_given(option):
            written = value.name if name != "batch_size" else value
            raise BadInput(option, written, "a teacher that is trained here; this one is loaded")
        vars(config)[option] = None
    if config.teacher_batch_size is not None and "batch_size" not in config.data.init_args:
        expected = f"data with `data.batch_size`; {config.data.name} makes its batches itself"
        raise BadInput("teacher_batch_size", config.teacher_batch_size, expected)


def _declarations(session: Session, key: str = TEACHER) -> type[Net]:
    """Return the class of a teacher or, of one that declares nothing, the base of ours."""
    net_class = choice_at(session.config, key).target
    return net_class if issubclass(net_class, Net) else Net


def teacher_epochs(session: Session, key: str = TEACHER) -> int | None:
    """Return epochs of a teacher: as given, or those of its first fit that is finished, otherwise the Trainer's."""
    if session.config.teacher_epochs:
        return int(session.config.teacher_epochs)
    records = (session.out / f"seed{seed}" / f"{teacher_row_name(key)}.json" for seed in session.config.seeds)
    epochs = (FitRecord.read(record).max_epochs for record in records if record.exists())
    return next(filter(None, epochs), session.config.trainer.init_args["max_epochs"])


def load_teacher(session: Session, net: nn.Module, seed: int) -> None:
    """Load the weights of `teacher_ckpt` into a seed's teacher, with its logits in the order of the data's classes.

    Raises:
        BadInput: they don't fit, are of a net with other options, or have learnt other classes.
    """
    config, path = session.config, checkpoint_of(session, seed)
    for line in load_weights(net, path, "teacher_ckpt", config.teacher_ckpt_partial, config.teacher_ckpt_ema):
        notice(f"seed {seed} teacher   {path}: {line}")
    check_options(path, net_spec(session, TEACHER), TEACHER)
    classes: Any = read_classes(Path(path).parent) or (None if config.teacher_ckpt_partial else ())
    net.class_names = classes
    is_trained = bool(config.teacher_epochs)
    if not is_trained:
        check_expects(session.data, read_expects(Path(path).parent), "teacher_ckpt")
    match_classes(session, net, "teacher_ckpt", path, is_trained)


def note_origins(session: Session, teacher: nn.Module, seed: int, source: str | None) -> None:
    """Note what a seed's teacher is, by which a run that grows knows it again.

    `source` tells a teacher whose outputs are stored, and which may not be loaded.
    """
    config = session.config
    key = f"{TEACHER} of seed {seed}" if "{seed}" in (config.teacher_ckpt or "") else TEACHER
    if source is not None:
        session.origins[key] = Origin({}, source)
    elif config.teacher_ckpt is not None:
        session.origins[key] = Origin.of(teacher, has_weights=True)


def checkpoint_of(session: Session, seed: int) -> str:
    """Return the path of `teacher_ckpt` for a seed."""
    return str(session.config.teacher_ckpt).replace("{seed}", str(seed))
