"""The teacher of a comparison: whether and how long it is trained, the weights and states that it is loaded from."""

from pathlib import Path
from typing import Any

from torch import Tensor, nn

from apprentice.errors import BadInput
from apprentice.weights import read_saved
from harness import cli
from harness.runs.nets import check_options, read_classes, read_expects
from harness.runs.quiet import notice
from harness.runs.records import FitRecord
from harness.runs.session import Session
from harness.runs.taught import TEACHER, row_of
from harness.studies.choices import check_expects, match_classes, net_spec
from lit_modules import nets
from lit_modules.learner import Learner
from lit_modules.nets.weights import load_weights

CONTINUE = "teacher_continue"
# Keys of a parameter group by which kinds of optimizers differ.
KINDS = frozenset({"alpha", "betas", "etas", "lambd", "lr_decay", "momentum", "rho"})


def has_trained_teacher(run: Session, key: str = TEACHER) -> bool:
    """Return whether the teacher chosen under a key is loaded, not trained."""
    net_class, config = _declarations(run, key), run.config
    brings_weights = cli.choice_at(config, key).init_args.get(net_class.trained_if, False)
    is_loaded = (config.teacher_ckpt is not None and key == TEACHER) or brings_weights
    return (is_loaded and not config.teacher_epochs) or net_class.is_trained


def check_head_only(run: Session) -> None:
    """Raise BadInput if the teacher's head alone is to be trained and the rest is new, or nothing is trained."""
    chosen = run.config.teacher
    brings_weights = any(chosen.init_args.get(name) != value for name, value in _declarations(run).untrained.items())
    is_loaded = brings_weights or run.config.teacher_ckpt is not None
    if run.config.teacher_head_only and (not is_loaded or has_trained_teacher(run)):
        expected = "--teacher_ckpt FILE and --teacher_epochs N beside it, or a teacher with --teacher.weights"
        raise BadInput("teacher_head_only", "true", expected)


def check_own_settings(run: Session) -> None:
    """Raise BadInput for settings of a teacher's training where it is loaded, or its data make their own batches."""
    config = run.config
    for name in ("optimizer", "scheduler", "batch_size"):
        if (value := vars(config)[f"{TEACHER}_{name}"]) is not None and has_trained_teacher(run):
            written = value.name if name != "batch_size" else value
            raise BadInput(f"{TEACHER}_{name}", written, "a teacher that is trained here; this one is loaded")
    if config.teacher_batch_size is not None and "batch_size" not in config.data.init_args:
        expected = f"data with --data.batch_size; {config.data.name} makes its batches itself"
        raise BadInput("teacher_batch_size", config.teacher_batch_size, expected)


def _declarations(run: Session, key: str = TEACHER) -> type[nets.Net]:
    """Return the class of a teacher or, of one that declares nothing, the base of ours."""
    net_class = cli.choice_at(run.config, key).target
    return net_class if issubclass(net_class, nets.Net) else nets.Net


def teacher_epochs(run: Session, key: str = TEACHER) -> int | None:
    """Return epochs of a teacher: as given, or those of its first fit that is finished, otherwise the Trainer's."""
    if run.config.teacher_epochs:
        return int(run.config.teacher_epochs)
    records = (run.out / f"seed{seed}" / f"{row_of(key)}.json" for seed in run.config.seeds)
    epochs = (FitRecord.read(record).max_epochs for record in records if record.exists())
    return next(filter(None, epochs), run.config.trainer.init_args["max_epochs"])


def load_teacher(run: Session, net: nn.Module, seed: int) -> None:
    """Load the weights of `--teacher_ckpt` into a seed's teacher, with its logits in the order of the data's classes.

    Raises:
        BadInput: they don't fit, are of a net with other options, or have learnt other classes.
    """
    config, path = run.config, checkpoint_of(run, seed)
    for line in load_weights(net, path, "teacher_ckpt", config.teacher_ckpt_partial, config.teacher_ckpt_ema):
        notice(f"seed {seed} teacher   {path}: {line}")
    check_options(path, net_spec(run, TEACHER), TEACHER)
    classes: Any = read_classes(Path(path).parent) or (None if config.teacher_ckpt_partial else ())
    net.class_names = classes
    is_trained, may_move = bool(config.teacher_epochs), not config.teacher_continue
    if not is_trained:
        check_expects(run.data, read_expects(Path(path).parent), "teacher_ckpt")
    match_classes(run, net, "teacher_ckpt", path, is_trained, may_move)


def checkpoint_of(run: Session, seed: int) -> str:
    """Return the path of `--teacher_ckpt` for a seed."""
    return str(run.config.teacher_ckpt).replace("{seed}", str(seed))


def go_on(module: Learner, path: str) -> None:
    """Let the module's fit begin with the states in the file: `optimizer` and `scheduler`, or as Lightning names them.

    Raises:
        BadInput: the file has no optimizer's state, or one of another kind, or of other parameters.
    """
    saved = read_saved(path, CONTINUE)
    state = _find_state(saved, "optimizer", "optimizer_states")
    scheduler = _find_state(saved, "scheduler", "lr_schedulers")
    if not isinstance(state, dict) or not state.get("param_groups") or "state" not in state:
        raise BadInput(CONTINUE, "true", f"the state of an optimizer in {path}, as optimizer or optimizer_states")
    optimizers, schedulers = module.configure_optimizers()
    groups = optimizers[0].state_dict()["param_groups"]
    if {*state["param_groups"][0]} & KINDS != {*groups[0]} & KINDS:
        name = type(optimizers[0]).__name__
        raise BadInput(CONTINUE, "true", f"the state of {name} in {path}; it is of another optimizer")
    if not _fits(state, module, len(groups)):
        raise BadInput(CONTINUE, "true", f"the state of an optimizer of this net's parameters, in one group, in {path}")
    if bool(schedulers) != bool(scheduler):
        expected = "--scheduler beside it" if scheduler else "no --scheduler"
        raise BadInput(CONTINUE, "true", f"{expected}: {path} has {'' if scheduler else 'no '}state of one")
    module.start = state, scheduler


def _find_state(saved: Any, name: str, several: str) -> Any:
    """Return a state by its usual names."""
    states = saved if isinstance(saved, dict) else {}
    listed = states.get(several) or [None]
    return next((states[key] for key in (name, f"{name}_state_dict", f"lr_{name}") if key in states), listed[0])


def _fits(state: dict[str, Any], module: Learner, groups: int) -> bool:
    """Return whether it has as many groups, and for each parameter tensors of its shape."""
    shapes = [p.shape for group in module.parameter_groups().values() for p in group]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    if len(state["param_groups"]) != groups or len(numbers) != len(shapes):
        return False
    states = (state["state"].get(number, {}).values() for number in numbers)
    return all(
        value.shape == shape
        for values, shape in zip(states, shapes, strict=True)
        for value in values
        if isinstance(value, Tensor) and value.dim()
    )
