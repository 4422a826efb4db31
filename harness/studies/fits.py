"""The nets and fits of an experiment: a fit leaves its nets and a record in the run's folder and is not repeated."""

import copy
import math
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from torch import nn

import strategies
from apprentice.batch import Batch
from apprentice.errors import BadInput, reason
from apprentice.keyed import with_seed
from datamodules import InMemoryData
from harness import cli
from harness.cli.classes import imported
from harness.reports import hparams, means, samples
from harness.runs import safepoints
from harness.runs.fit import Fit, fit_and_test
from harness.runs.launch import is_main_process, main_first
from harness.runs.nets import Spec, load_net, read_spec, save_checkpoint, save_net, spec
from harness.runs.progress import progress
from harness.runs.quiet import notice
from harness.runs.records import Failure, FitRecord, NetRecord
from harness.runs.session import Session
from harness.studies import costs
from harness.studies.callbacks import drop_unsuited
from harness.studies.classes import match_classes
from harness.studies.remaining import Plan, remaining
from lit_modules import nets
from lit_modules.classifier import LitClassifier
from lit_modules.distillation import Distillation
from lit_modules.learner import Learner
from lit_modules.nets.recorded import Recorded
from lit_modules.tasks import Metric, Task, task_of

DEFAULT_METRIC = "accuracy"  # value of `--metric` for what the task itself judges by
LONG = 60.0  # seconds of a fit whose steps may take long to time


@dataclass
class Candidate:
    """One of the nets that a fit trains."""

    net: nn.Module  # the bare net, which is exported
    spec: Spec  # how to rebuild it
    objective: str  # name of what it learns by
    options: Mapping[str, Any]  # of the objective
    settings: Namespace | None = None  # what it is trained with, if not with the run's
    replaced: str | None = None  # the class of its net, if its objective made that from the one that was chosen


Make = Callable[[], tuple[Learner, dict[str, Candidate]]]


def make_net(config: Namespace, key: str, seed: int, given: Mapping[str, Any], double: bool = False) -> nn.Module:
    """The net chosen under a key, its first weights from the seed alone; `given` are arguments that the data fixes."""
    choice = cli.chosen(config, key)
    members = {name: [load_net(folder, f"{key}.{name}") for folder in of] for name, of in folders(choice).items()}
    net: nn.Module = nets.giving_logits(with_seed(seed, lambda: cli.build(choice, key, **given, **members)))
    return net.double() if double else net


def folders(choice: cli.Choice) -> dict[str, list[str]]:
    """The folders of trained nets that an ensemble is made of, by the option that names them."""
    is_ensemble = issubclass(imported(choice.class_path, ""), nets.Ensemble)
    return {"members": choice.init_args["members"]} if is_ensemble else {}


def make_candidate(
    run: Session, key: str, seed: int, objective: str, options: Mapping[str, Any], double: bool = False
) -> Candidate:
    """The net chosen under a key as a candidate of a fit, with the options of its objective."""
    net = make_net(run.config, key, seed, run.data.net_arguments, double)
    is_trained = isinstance(net, nets.Ensemble)
    match_classes(run, net, key, cli.chosen(run.config, key).name, trained=not is_trained)
    return Candidate(net, net_spec(run, key), objective, options)


def net_spec(run: Session, key: str) -> Spec:
    """How to rebuild the net chosen under a key."""
    choice = cli.chosen(run.config, key)
    members = {name: [read_spec(folder, f"{key}.{name}") for folder in of] for name, of in folders(choice).items()}
    arguments = cli.arguments(choice, key, **run.data.net_arguments, **members)
    net_class = imported(choice.class_path, key)
    return spec(choice.class_path, net_class.remade_by(arguments) if issubclass(net_class, Recorded) else arguments)


def replaced(run: Session, candidate: Candidate, net: nn.Module) -> Candidate:
    """The candidate of a student, with the net that its objective has put in the place of the student's."""
    if net is candidate.net:
        return candidate
    nets = {"student": candidate.spec, "teacher": net_spec(run, "teacher")}
    found = spec(f"{type(net).__module__}.{type(net).__name__}", {**nets, "input_shape": run.data.input_shape})
    return replace(candidate, net=net, spec=found, replaced=type(net).__name__)


def learning(config: Namespace, data: InMemoryData) -> dict[str, Any]:
    """The task, and what makes the chosen optimizer and scheduler, as arguments of a Learner."""
    optimizer, scheduler = cli.factory(config.optimizer, "optimizer"), None
    if config.scheduler is not None:
        scheduler = cli.factory(config.scheduler, "scheduler")
    return {"optimizer": optimizer, "scheduler": scheduler, "task": chosen_task(config, data)}


def chosen_task(config: Namespace, data: InMemoryData) -> Task:
    """The data's task, with nets judged by `--metric`, which not every experiment has; BadInput if it has no such."""
    metric = getattr(config, "metric", DEFAULT_METRIC)
    return task_of(data, None if metric == DEFAULT_METRIC else metric)


def judged_by(config: Namespace, data: InMemoryData) -> Metric:
    """What nets are judged by; BadInput if that can't be."""
    return chosen_task(config, data).metric


def check_net(run: Session, key: str, trainer: Trainer, trained: bool = True) -> None:
    """Raise BadInput if the net chosen under a key does not fit seed, data or strategy; `trained` or only evaluated."""
    config, data, strategy = run.config, run.data, trainer.strategy
    net, again = (make_net(config, key, config.seeds[0], data.net_arguments, run.is_double) for _ in range(2))
    if trained:
        nets.check_same_start(net, again, key)
    for flag, expected in getattr(net, "expects", {}).items():
        if hasattr(data, flag) and tuple(getattr(data, flag)) != tuple(expected):
            told = f"{list(expected)}, with which the weights of --{key} were trained"
            raise BadInput(f"data.{flag}", list(getattr(data, flag)), told)
    tokenizer = getattr(net, "tokenizer", None)
    if tokenizer is not None:
        data.check_tokenizer(tokenizer, f"--{key}")
    logits = *data.label_shape, data.num_classes
    # A GPU's kernels are not tried: after that, forked ranks could not use the GPU.
    with nullcontext() if strategy.root_device.type == "cpu" else nets.any_kernel(net):
        nets.check_fits(net, data.example, logits, key, trained)
    if isinstance(strategy, strategies.PipelineStrategy) or getattr(strategy, "splits", False):
        with cli.refusals(cli.chosen(config, key), key):
            nets.pipeline_stages(net, key)


def check_modules(run: Session, trainer: Trainer, *modules: Learner) -> None:
    """Raise BadInput if the strategy can't train one of the modules."""
    if isinstance(trainer.strategy, strategies.DataParallel):
        for module in modules:
            try:
                with cli.refusals(run.config.trainer, "trainer"):
                    trainer.strategy.check_module(module)
            except BadInput as error:
                option = error.flag.removeprefix("trainer.")
                if error.__cause__ is not None and option in {"trainer", *vars(run.config)}:  # such as --exact
                    raise error.__cause__ from None
                raise


def check_batch_size(run: Session, *modules: Learner) -> None:
    """Raise BadInput if a module can't be trained as each batch has one row, which has no variance for BatchNorm."""
    if min(run.data.batch_size, run.used["train"]) > 1:
        return
    for module in modules:
        try:
            copy.deepcopy(module).train()(nets.typed(module, run.data.example[:1]))
        except ValueError as error:
            raise BadInput("data.batch_size", run.data.batch_size, f"at least 2; {reason(error)}") from None


def train(
    run: Session,
    seed: int,
    name: str,
    make: Make,
    trained: bool = False,
    keep: bool = False,
    plan: Plan = MappingProxyType({}),
    all_labels: bool = False,
    tested: bool = True,
    until: int | None = None,
    **options: Any,
) -> FitRecord:
    """Fit and test a module of one or several candidates, export their nets, measure their costs; return the record.

    `make` makes the module and its candidates by name, unless the fit of this name is finished. One that was finished
    with fewer epochs goes on if its last checkpoint was kept (`keep`), and else starts again: the bits are the same.
    A `trained` module is only tested. `plan` are the fits of the whole run, if there are others. With `all_labels` it
    learns from those too that `--data.labelled` hides. If it is not `tested`, no cost is measured either; with `until`
    it ends after that epoch, and only its checkpoint has the nets. `options` of the Trainer replace the user's.

    Raises:
        Interrupted: the user asked to stop; the checkpoint has what was trained.
    """
    folder = run.out / f"seed{seed}"
    path, checkpoint = folder / f"{name}.json", folder / f"{name}.ckpt"
    epochs = None if trained else options.get("max_epochs", run.config.trainer.init_args["max_epochs"])
    before = FitRecord.read(path) if path.exists() else None
    if before is not None and before.max_epochs == epochs:
        if is_main_process() and not keep:
            checkpoint.unlink(missing_ok=True)  # the process may have been killed just before
        return before
    with main_first(f"{folder.name} {name}"):
        extended = _extended(run, f"seed {seed} {name}", checkpoint, before.max_epochs if before else None, epochs)
    run.data.order_seed, run.data.hides_labels = seed, not all_labels
    module, candidates = make()
    fit = fit_and_test(
        module, run.data, partial(run.trainer, **options), checkpoint, runs=list(candidates), trained=trained,
        every=run.config.checkpoint_every, tensorboard=run.tensorboard, extended=extended,
        more=run.loggers(f"{folder.name}/{name}"), suited=partial(drop_unsuited, run, f"seed {seed} {name}", module),
        score=judged_by(run.config, run.data).score, tested=tested, until=until,
        show=progress(f"seed {seed} {name:8}", remaining(run, plan, seed, name)),
    )  # fmt: skip
    nets: dict[str, NetRecord] = {}
    record = FitRecord(fit.seconds, epochs, nets)
    if isinstance(module, Distillation):
        record = replace(record, teacher_samples=module.teacher_samples, teacher_stored=module.teacher_stored)
    if is_main_process():
        module.to(fit.device)  # a fit on a GPU ends on the CPU
        for key, candidate in candidates.items():
            if tested and fit.seconds is not None and fit.seconds > LONG:
                notice(f"seed {seed} {name:8}  timing a step of {key}")
            nets[key] = _record(module, key if key in module.runs else "", candidate, fit, run.data)
            if until is None:
                save_net(candidate.net, candidate.spec, folder / key, getattr(run.data, "class_names", ()))
            if run.tensorboard:
                log_row(run, seed, candidate, nets[key].figures, folder / key)
        record.write(path)
        if not keep:
            checkpoint.unlink(missing_ok=True)
    wait_for_main()
    return record


def _extended(run: Session, label: str, checkpoint: Path, done: int | None, epochs: int | None) -> bool:
    """Whether a checkpoint is of a fit of fewer epochs, from which one of `epochs` goes on; deletes it if none can.

    `done` are the epochs of the fit's record.
    """
    had = safepoints.max_epochs(safepoints.read(checkpoint)) if checkpoint.exists() else None
    if epochs is None or had == epochs or (had is None and done is None):
        return False
    why = "" if had else "the folder has no checkpoint of it"
    if run.config.trainer.init_args["callbacks"]:
        why = "--trainer.callbacks may depend on the number of epochs"
    elif had == 1:
        why = "a teacher's outputs are stored from two epochs on"
    if is_main_process():
        how = f"starts again, as {why}; the result is the same" if why else "goes on"
        print(f"{label}: from {done or had} to {epochs} epochs; {how}", flush=True)
        if why:
            checkpoint.unlink(missing_ok=True)
    return not why


def save_classifier(run: Session, seed: int, net: str) -> None:
    """Write `classifier.ckpt` beside a net's weights, from which `LitClassifier.load_from_checkpoint` makes it."""
    folder = run.out / f"seed{seed}" / net
    loaded = with_seed(0, lambda: load_net(folder, "out"))
    module = LitClassifier(loaded, run.data.num_classes, seed=seed, **learning(run.config, run.data))
    module.hparams["net"] = read_spec(folder, "out")  # also of a net that is no `lit_modules.nets.Net`
    save_checkpoint(module, folder / "classifier.ckpt")


def log_row(run: Session, seed: int, candidate: Candidate, figures: Mapping[str, float | None], folder: Path) -> None:
    """Write a net's row in TensorBoard's HPARAMS tab."""
    score, given, options = judged_by(run.config, run.data).score, run.data.net_arguments, candidate.options
    net = cli.Choice(candidate.spec["class_path"], candidate.spec["init_args"])
    row = {
        score: figures[f"test_{score}"], "net": hparams.words(net, "net", given), "seed": str(seed),
        "objective": hparams.call(candidate.objective, options), **hparams.settings(candidate.settings or run.config),
        **options,
    }  # fmt: skip
    hparams.log_run(folder, row, figures, score, hparams.options_of_all(run.config))


def log_means(run: Session, nets: Sequence[str]) -> None:
    """Write the TensorBoard runs of methods, over the seeds that have finished all these nets."""
    if run.tensorboard and is_main_process():
        means.log_means(run.out, run.config.seeds, nets)


def wait_for_main() -> None:
    """Where a launcher started the ranks, wait until the first has written its files."""
    if dist.is_initialized():
        dist.barrier()


def course(module: Learner, run: str) -> list[dict[str, float | None]]:
    """Of each epoch a run's values as they were logged, without its name: `train/loss`, `val/acc` and the like.

    None stands for what is infinite, such as a perplexity.
    """
    prefix = f"{run}/" if run else ""

    def finite(value: float) -> float | None:
        return value if math.isfinite(value) else None

    own = (
        {name.removeprefix(prefix): finite(x) for name, x in each.items() if name.startswith(prefix)}
        for each in module.epochs
    )
    return [values for values in own if values]


def _record(module: Learner, run: str, candidate: Candidate, fit: Fit, data: InMemoryData) -> NetRecord:
    prefix = f"{run}/test" if run else "test"
    failed, names = module.failed.get(run), module.scores_of(run).names
    figures: dict[str, float | None] = {
        "parameters": sum(p.numel() for p in candidate.net.parameters()),
        **{f"test_{name}": None if failed or not fit.scores else fit.scores[f"{prefix}/{name}"] for name in names},
        "step_ms": None,
        "train_flops": None,
    }
    if (correct := figures.get("test_correct")) is not None:
        figures["test_correct"] = round(correct)
    means, values = samples.recorded(module.task, fit.samples.get(run, {}))
    if module.samples and not failed and fit.scores:  # a loaded net has no training to measure
        weight, count = next(module.parameters()), min(data.batch_size, data.sizes["train"])
        inputs, labels = data.samples("train", torch.arange(count), weight.dtype)
        pair = inputs.to(weight.device), labels.to(weight.device)
        with fit.autocast():
            step = module.step_alone(run, Batch.of(pair, 0, shared=False))
            if (operations := costs.flops(step)) is not None:
                figures["train_flops"] = round(operations / len(labels) * module.samples)
            figures["step_ms"] = costs.milliseconds(step)
    return NetRecord(
        candidate.objective,
        {**figures, **means},
        Failure(**failed) if failed else None,
        fit.epochs,
        course(module, run),
        candidate.replaced,
        values,
    )
