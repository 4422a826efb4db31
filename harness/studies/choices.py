"""What the command line chooses, built and checked for the data of a run: nets, optimizer, scheduler, task."""

import copy
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from pkgutil import resolve_name
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn

import strategies
from apprentice.batch import Batch
from apprentice.errors import BadInput, naming, reason
from apprentice.keyed import with_seed
from datamodules.base import InMemoryData
from harness import cli
from harness.cli.classes import import_class
from harness.runs.arm_names import choice_at
from harness.runs.facts import Spec, spec
from harness.runs.nets import load_net, read_spec
from harness.runs.session import Session
from harness.runs.training_options import scheduler_factory
from lit_modules.nets.attention.form import any_kernel
from lit_modules.nets.base import Net, cast_inputs, check_fits, check_same_start, pipeline_stages, unwrap_logits
from lit_modules.nets.classes import are_named, class_order, classes_of, members_of, reorder_classes
from lit_modules.nets.ensemble import Ensemble
from lit_modules.nets.from_teacher import FromTeacher
from lit_modules.nets.identity import Origin
from lit_modules.nets.layers import check_keeps_apart
from lit_modules.nets.specs import Recorded, path_of
from lit_modules.nets.stored import TeacherInFile
from lit_modules.tasks import CLASSES, Metric, OwnMetric, Task, task_class, task_of
from lit_modules.training.loop import Loop
from strategies.exact import ExactSteps

FLOAT32 = 4  # bytes
NARROW = {"16-true", "bf16-true", "transformer-engine", "transformer-engine-float16"}  # precisions of weights
IN_FILE = "harness.studies.teacher_file"  # imported for a teacher whose outputs are in a file
DEFAULT_METRIC = "accuracy"  # value of `metric` for what the task itself judges by


def arguments_set_by_data(chosen: Mapping[str, Any]) -> Iterable[str]:
    """Return the arguments of nets that the chosen data gives, those of images where it is of other people's class."""
    data = chosen["data"].target
    return data.given_to_nets if issubclass(data, InMemoryData) else InMemoryData.given_to_nets


def has_tokens(chosen: Any) -> bool:
    """Return whether the samples of a data set are texts, with a label for each token."""
    return getattr(chosen, "task", None) == "tokens"


def make_net(config: Namespace, key: str, seed: int, arguments: Mapping[str, Any], double: bool = False) -> nn.Module:
    """Build the net chosen under a key, its first weights from the seed alone, with arguments that the data fixes.

    BadInput for one that is made of a teacher.
    """
    choice = choice_at(config, key)
    if is_from_teacher(config, key):
        expected = f"a net by itself; {choice.name} is a student of kd.py, made of its teacher's weights"
        raise BadInput(key, choice.name, expected)
    if issubclass(choice.target, Ensemble):
        members = [load_net(folder, flag) for flag, folder in member_folders(choice, key)]
        arguments = {**arguments, "members": members}
    net: nn.Module = unwrap_logits(with_seed(seed, lambda: cli.build(choice, key, **arguments)))
    return net.double() if double else net


def member_folders(choice: cli.Choice, key: str) -> list[tuple[str, str]]:
    """Return the folders of an ensemble's trained members, each after its flag; BadInput for what is no folder."""
    flags = {f"{key}.members.{number}": folder for number, folder in enumerate(choice.init_args["members"])}
    for flag, folder in flags.items():
        if not isinstance(folder, str):
            raise BadInput(flag, folder, "the folder of a trained net, as RUN/seed0/kd")
    return [*flags.items()]


def build_net(session: Session, key: str, seed: int) -> nn.Module:
    """Build the net chosen under a key for a fit of a run's data; BadInput if it has learnt other classes."""
    net = make_net(session.config, key, seed, session.data.net_arguments, session.is_double)
    net = net_of_task(session, net, key)
    is_trained = isinstance(net, Ensemble)
    match_classes(session, net, key, choice_at(session.config, key).name, trained=not is_trained)
    net_spec(session, key)  # or arguments that net.yaml can't hold are refused
    return net


def is_from_teacher(config: Namespace, key: str) -> bool:
    """Return whether the net chosen under a key is made of its teacher's weights."""
    return issubclass(choice_at(config, key).target, FromTeacher)


def net_spec(session: Session, key: str) -> Spec:
    """Return how to rebuild the net chosen under a key."""
    choice, arguments = choice_at(session.config, key), dict(session.data.net_arguments)
    if issubclass(choice.target, Ensemble):
        arguments["members"] = [read_spec(folder, flag) for flag, folder in member_folders(choice, key)]
    values = cli.arguments(choice, key, **arguments)
    if issubclass(choice.target, Recorded):
        values = choice.target.rebuild_arguments(values)
    with cli.refusals(choice, key):
        chosen = spec(choice.class_path, values)
    holder = "" if is_in_file(session.config, key) else task_class(session.data.task).net
    return spec(holder, {"net": chosen, "input_shape": session.data.input_shape}) if holder else chosen


def net_of_task(session: Session, net: nn.Module, key: str) -> nn.Module:
    """Return a net that gives the outputs of the data's task, of the one chosen under a key."""
    if isinstance(net, TeacherInFile):
        found: nn.Module = resolve_name(f"{IN_FILE}.find_outputs")(session, net, key)
        return found
    if not (holder := task_class(session.data.task).net):
        return net
    with naming(key):
        held: nn.Module = resolve_name(holder)(net, input_shape=session.data.input_shape)
        return held


def is_in_file(config: Namespace, key: str) -> bool:
    """Return whether the net chosen under a key has no weights, but outputs in a file."""
    return issubclass(choice_at(config, key).target, TeacherInFile)


def trained_spec(session: Session, key: str, net: nn.Module, teacher: str = "teacher") -> Spec:
    """Return how to rebuild a trained net: the one chosen under a key, or what its objective made of it and a teacher.

    `teacher` is the key under which the teacher was chosen.
    """
    if is_from_teacher(session.config, key) and isinstance(net, Recorded):
        return spec(path_of(type(net)), net.rebuild_arguments(net.init_args))
    chosen = net_spec(session, key)
    if type(net) is import_class(chosen["class_path"], key):
        if not task_class(session.data.task).net or not isinstance(net, Recorded):
            return chosen
        return spec(chosen["class_path"], {**net.init_args, **chosen["init_args"]})
    parts = {"student": chosen, "teacher": net_spec(session, teacher), "input_shape": session.data.input_shape}
    return spec(f"{type(net).__module__}.{type(net).__name__}", parts)


def learner_options(config: Namespace, data: InMemoryData) -> dict[str, Any]:
    """Return the task, and what makes the chosen optimizer and scheduler, as arguments of a Loop."""
    optimizer, scheduler = cli.factory(config.optimizer, "optimizer"), None
    if config.scheduler is not None:
        scheduler = scheduler_factory(config.scheduler, "scheduler")
    return {"optimizer": optimizer, "scheduler": scheduler, "task": chosen_task(config, data)}


def chosen_task(config: Namespace, data: InMemoryData) -> Task:
    """Return the data's task, judged by `metric` if the experiment has it; BadInput for a metric of another task."""
    metric = vars(config).get("metric", DEFAULT_METRIC)
    if isinstance(metric, cli.Choice):
        signature = metric.signature
        arguments = {name: x for name, x in metric.init_args.items() if x != signature.defaults.get(name)}
        if "num_classes" in signature.hints:
            arguments["num_classes"] = data.num_classes
        metric = OwnMetric(metric.class_path, arguments)
    return task_of(data, None if metric == DEFAULT_METRIC else metric)


def notice_metric_direction(session: Session) -> None:
    """Say that more of a metric is taken as better, where it says nothing of it."""
    judge = getattr(chosen_task(session.config, session.data), "scored", None)
    if isinstance(judge, OwnMetric) and judge.higher_is_better is None:
        session.tell(f"metric {judge.path}: more is taken as better, as it has no attribute higher_is_better")


def judged_by(config: Namespace, data: InMemoryData) -> Metric:
    """Return the metric that nets are judged by; BadInput for one of another task."""
    return chosen_task(config, data).metric


def match_classes(
    session: Session, net: nn.Module, key: str, value: object, trained: bool = False, may_move: bool = True
) -> None:
    """Bring the logits of a net's weights into the order of the data's classes; a line says where that is not known.

    `key` and `value` say where the net was chosen. One that is `trained` from there may have learnt other classes; a
    line says so.

    Raises:
        BadInput: the net has other classes, or another order and logits may not move (`may_move`).
    """
    classes = tuple(session.data.class_names) if task_class(session.data.task).outputs == CLASSES else ()
    for member in members_of(net):
        learnt = classes_of(member)
        if not classes or learnt is None or len(learnt) not in {0, len(classes)}:
            continue  # the head is new, or else its size is refused
        try:
            order = class_order(learnt, classes, key, value)
        except BadInput as fault:
            if not trained:
                raise
            session.tell(f"{cli.with_flag(fault)}; its head begins with the weights of other classes")
            continue
        if order.note and (learnt or are_named(classes)):  # if neither has names, there is nothing to tell
            session.tell(f"{key} {value}: {order.note}, in this order")
        if order.moves:
            if not may_move:
                expected = f"a net with the data's order of classes; its first is {learnt[0]}, and not {classes[0]}"
                raise BadInput(key, value, expected)
            reorder_classes(member, order.places, session.data.example, key)
            session.tell(f"{key} {value}: its logits are put into the order of the data's classes")
        member.class_names = classes  # type: ignore[assignment]


def check_expects(data: InMemoryData, expects: Mapping[str, Sequence[float]], key: str) -> None:
    """Raise BadInput if the data's images have another mean or deviation than those that weights have learnt from."""
    for flag, expected in expects.items():
        value = getattr(data, flag, expected)
        if tuple(value) != tuple(expected):
            trained_with = f"{list(expected)}, with which the weights of `{key}` were trained"
            raise BadInput(f"data.{flag}", list(value), trained_with)


def check_net(session: Session, key: str, trainer: Trainer, trained: bool = True) -> None:
    """Raise BadInput if the net chosen under a key does not fit seed, data or strategy; `trained` or only evaluated."""
    config, data, strategy = session.config, session.data, trainer.strategy
    net = make_net(config, key, config.seeds[0], data.net_arguments, session.is_double)
    net = net_of_task(session, net, key)
    if isinstance(net, TeacherInFile):
        resolve_name(f"{IN_FILE}.check_in_file")(session, net, key, trainer)
        return
    if trained:  # a teacher that is loaded may fill the memory once
        again = make_net(config, key, config.seeds[0], data.net_arguments, session.is_double)
        again = net_of_task(session, again, key)
        check_same_start(net, again, key)
    chosen = choice_at(config, key)
    has_weights = getattr(net, "is_trained", False) or chosen.init_args.get(getattr(net, "trained_if", ""), False)
    session.origins[key] = Origin.of(net, bool(has_weights))
    if isinstance(net, Net):
        check_expects(data, net.expects, key)
        data.check_net(net, f"`{key}`", trained)
    if data.packs_samples:
        if isinstance(strategy, strategies.PipelineStrategy):
            raise BadInput("data.pack", True, "false with `trainer.strategy pipeline`, whose stages get tokens alone")
        for part in net.members.nets if isinstance(net, Ensemble) else [net]:
            check_keeps_apart(part, key)
    if trained:
        check_weights_type(net, key)
    logits = *data.label_shape, getattr(net, "width", data.num_classes)
    if getattr(net, "ranks", False):
        logits = logits[-1:]
    # A GPU's kernels are not tried: after that, forked ranks could not use the GPU.
    with nullcontext() if strategy.root_device.type == "cpu" else any_kernel(net):
        check_fits(net, data.example, logits, key, trained)
    if isinstance(strategy, strategies.PipelineStrategy):
        with cli.refusals(chosen, key):
            pipeline_stages(net, key)


def check_weights_type(net: nn.Module, key: str) -> None:
    """Raise BadInput for a net that trains weights of 16 bits, whose rounding is larger than most steps."""
    kinds = {p.dtype for p in net.parameters() if p.requires_grad and p.dtype.is_floating_point}
    if narrow := [kind for kind in kinds if kind.itemsize < FLOAT32]:
        flag = f"{key}.dtype" if "dtype" in getattr(net, "init_args", {}) else key
        expected = "float32 for weights that are trained: 16 bits would round most steps away"
        expected += "; `trainer.precision bf16-mixed` computes in bfloat16 beside them"
        raise BadInput(flag, str(narrow[0]).removeprefix("torch."), expected)


def check_modules(session: Session, trainer: Trainer, *modules: Loop) -> None:
    """Raise BadInput if the strategy can't train one of the modules."""
    if isinstance(trainer.strategy, strategies.DataParallel):
        for module in modules:
            try:
                with cli.refusals(session.config.trainer, "trainer"):
                    trainer.strategy.check_module(module)
            except BadInput as error:
                option = error.argument.removeprefix("trainer.")
                if error.__cause__ is not None and option in {"trainer", *vars(session.config)}:  # such as `exact`
                    raise error.__cause__ from None
                raise


def check_exact_step(session: Session, trainer: Trainer, module: Loop) -> None:
    """Raise BadInput if one step of a module shows that it can't be exact, where it is to be."""
    strategy, data = trainer.strategy, session.data
    steps = strategy.steps if isinstance(strategy, strategies.DataParallel) else None
    if not isinstance(steps, ExactSteps):
        return
    first, last = steps.first_shard(module, min(data.batch_size, session.used["train"]))
    inputs, labels = data.samples("train", torch.arange(first, last), next(module.parameters()).dtype)
    with nullcontext() if strategy.root_device.type == "cpu" else any_kernel(module):
        steps.check_step(module, Batch.of((inputs, labels), 0, shared=False))


def check_averages(session: Session, trainer: Trainer) -> None:
    """Raise BadInput if ranks don't have the weights that `ema` needs, or too narrow ones."""
    usual = SingleDeviceStrategy, strategies.DDP, strategies.ZeRO1, strategies.FSDP, strategies.HSDP
    strategy, decay = trainer.strategy, vars(session.config).get("ema")
    if decay is not None and str(trainer.precision) in NARROW:
        expected = (
            "`trainer.precision bf16-mixed` or another whose weights have 32 bits: of 16, averages would not move"
        )
        raise BadInput("ema", decay, expected)
    has_whole = type(strategy) in usual and getattr(strategy, "replica_size", 1) == 1
    if decay is not None and not has_whole:
        expected = "`trainer.strategy ddp`, ddp_zero1, fsdp or hsdp, on whose ranks a net's weights are the same"
        raise BadInput("ema", decay, f"{expected}; {type(strategy).__name__}'s are not")


def check_batch_size(session: Session, module: Loop) -> None:
    """Raise BadInput if a module can't be trained as each batch has one row, which has no variance for BatchNorm."""
    if min(session.data.batch_size, session.used["train"]) > 1:
        return
    try:
        copy.deepcopy(module).train()(cast_inputs(module, session.data.example[:1]))
    except ValueError as error:
        raise BadInput("data.batch_size", session.data.batch_size, f"at least 2; {reason(error)}") from None
