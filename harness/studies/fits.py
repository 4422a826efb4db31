"""Fits of an experiment: each leaves its nets and a record in the run's folder and is not repeated."""

import copy
import math
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
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
from harness.reports import means, samples
from harness.runs import hparams, safepoints
from harness.runs.fit import Fit, fit_and_test
from harness.runs.launch import is_main_process, main_first
from harness.runs.nets import Spec, load_net, read_spec, save_checkpoint, save_net
from harness.runs.plans import Arm, FitPlan
from harness.runs.progress import progress
from harness.runs.quiet import notice
from harness.runs.records import Failure, FitRecord, NetRecord
from harness.runs.remaining import remaining
from harness.runs.session import Session
from harness.runs.tensorboard import log_run
from harness.studies import costs
from harness.studies.nets import make_net, trained_spec
from lit_modules import nets
from lit_modules.classifier import LitClassifier
from lit_modules.distillation import Distillation
from lit_modules.learner import Learner
from lit_modules.tasks import Metric, Task, task_of

DEFAULT_METRIC = "accuracy"  # value of `--metric` for what the task itself judges by
LONG = 60.0  # seconds of a fit whose steps may take long to time


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
                if error.flag == "trainer" and error.__cause__ is not None:  # it names no option of the strategy's
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


def fit(run: Session, plan: FitPlan, build: Callable[[FitPlan], Learner], plans: Sequence[FitPlan] = ()) -> FitRecord:
    """Fit and test what is planned, export its nets and measure their costs, unless that is done; returns the record.

    A fit that was finished with fewer epochs goes on from its last checkpoint, if that was kept, and else starts again:
    the bits are the same.

    Args:
        run: the session, in its folder.
        plan: the fit.
        build: builds its module; one that is a single run trains the plan's only arm.
        plans: all fits of the run.

    Raises:
        Interrupted: the user asked to stop; the checkpoint has what was trained.
    """
    path, checkpoint = plan.record(run.out), plan.checkpoint(run.out)
    before = FitRecord.read(path) if path.exists() else None
    if before is not None and before.max_epochs == plan.epochs:
        if is_main_process() and not plan.keeps_checkpoint:
            checkpoint.unlink(missing_ok=True)  # the process may have been killed just before
        return before
    with main_first(f"seed{plan.seed} {plan.name}"):
        extended = _extends(run, plan, before.max_epochs if before else None)
    run.data.order_seed, run.data.hides_labels = plan.seed, not plan.all_labels
    module = build(plan)
    trained = [(arm, module.net_of(_run_of(module, arm))) for arm in plan.arms]
    exports = [(arm, net, trained_spec(run, arm.net, net)) for arm, net in trained]  # strategies may change its class
    show = progress(f"seed {plan.seed} {plan.name:8}", remaining(run.out, plans, plan))
    outcome = fit_and_test(run, plan, module, judged_by(run.config, run.data).score, extended, show)
    record = FitRecord(outcome.seconds, plan.epochs)
    if isinstance(module, Distillation):
        record = replace(record, teacher_samples=module.asked, teacher_stored=module.stored)
    if is_main_process():
        module.to(outcome.device)  # a fit on a GPU ends on the CPU
        for arm, net, spec in exports:
            if plan.tested and outcome.seconds is not None and outcome.seconds > LONG:
                notice(f"seed {plan.seed} {plan.name:8}  timing a step of {arm.name}")
            record.nets[arm.name] = measure(module, arm, outcome, run.data)
            if spec["class_path"] != cli.chosen(run.config, arm.net).class_path:
                record.nets[arm.name] = replace(record.nets[arm.name], net=type(net).__name__)
            save(run, plan, arm, net, spec, record.nets[arm.name])
        record.write(path)
        if not plan.keeps_checkpoint:
            checkpoint.unlink(missing_ok=True)
    wait_for_main()
    return record


def _extends(run: Session, plan: FitPlan, done: int | None) -> bool:
    """Whether the checkpoint is of a fit of fewer epochs, from which the planned one goes on.

    Deletes the checkpoint if none can. `done` are the epochs of the fit's record.
    """
    checkpoint = plan.checkpoint(run.out)
    had = safepoints.max_epochs(safepoints.read(checkpoint)) if checkpoint.exists() else None
    if plan.epochs is None or had == plan.epochs or (had is None and done is None):
        return False
    why = "" if had else "the folder has no checkpoint of it"
    if run.config.trainer.init_args["callbacks"]:
        why = "--trainer.callbacks may depend on the number of epochs"
    elif had == 1:
        why = "a teacher's outputs are stored from two epochs on"
    if is_main_process():
        how = f"starts again, as {why}; the result is the same" if why else "goes on"
        print(f"{plan.label}: from {done or had} to {plan.epochs} epochs; {how}", flush=True)
        if why:
            checkpoint.unlink(missing_ok=True)
    return not why


def measure(module: Learner, arm: Arm, outcome: Fit, data: InMemoryData) -> NetRecord:
    """Measure an arm: its scores in the test, and what a step of its training costs."""
    run = _run_of(module, arm)
    prefix, failed = f"{run}/test" if run else "test", module.failed.get(run)
    scores = {} if failed else outcome.scores
    figures: dict[str, float | None] = {
        "parameters": sum(p.numel() for p in module.net_of(run).parameters()),
        **{f"test_{name}": scores.get(f"{prefix}/{name}") for name in module.scores_of(run).names},
        "step_ms": None,
        "train_flops": None,
    }
    if (correct := figures.get("test_correct")) is not None:
        figures["test_correct"] = round(correct)
    of_samples, values = samples.recorded(module.task, outcome.samples.get(run, {}))
    if module.samples and scores:  # a loaded net has no training to measure
        weight, count = next(module.parameters()), min(data.batch_size, data.sizes["train"])
        inputs, labels = data.samples("train", torch.arange(count), weight.dtype)
        pair = inputs.to(weight.device), labels.to(weight.device)
        with outcome.autocast():
            step = module.step_alone(run, Batch.of(pair, 0, shared=False))
            if (operations := costs.flops(step)) is not None:
                figures["train_flops"] = round(operations / len(labels) * module.samples)
            figures["step_ms"] = costs.milliseconds(step)
    return NetRecord(
        arm.method.name, {**figures, **of_samples}, Failure(**failed) if failed else None, outcome.epochs,
        list_epochs(module, run), samples=values,
    )  # fmt: skip


def _run_of(module: Learner, arm: Arm) -> str:
    """The name of an arm's run in a module of several, "" in a module that is one run."""
    return arm.name if arm.name in module.runs else ""


def list_epochs(module: Learner, run: str) -> list[dict[str, float | None]]:
    """Of each epoch a run's values as they were logged, without its name: `train/loss`, `val/acc` and the like.

    None stands for what is infinite, such as a perplexity.
    """
    prefix = f"{run}/" if run else ""
    epochs = []
    for epoch in module.epochs:
        values = {name.removeprefix(prefix): x for name, x in epoch.items() if name.startswith(prefix)}
        epochs.append({name: x if math.isfinite(x) else None for name, x in values.items()})
    return [values for values in epochs if values]


def save(run: Session, plan: FitPlan, arm: Arm, net: nn.Module, spec: Spec, record: NetRecord) -> None:
    """Write an arm's net, unless its fit is to go on, and its row in TensorBoard."""
    folder = plan.folder(run.out) / arm.name
    if plan.until is None:
        save_net(net, spec, folder, getattr(run.data, "class_names", ()))
    if run.tensorboard:
        log_row(run, plan.seed, arm, spec, record.figures)


def log_row(run: Session, seed: int, arm: Arm, spec: Spec, figures: Mapping[str, float | None]) -> None:
    """Write an arm's row in TensorBoard's HPARAMS tab."""
    score, options = judged_by(run.config, run.data).score, arm.method.init_args
    net = cli.Choice(spec["class_path"], spec["init_args"])
    row = {
        score: figures[f"test_{score}"], "net": hparams.words(net, "net", run.data.net_arguments), "seed": str(seed),
        "objective": hparams.call(arm.method.name, options), **hparams.settings(arm.settings(run.config)), **options,
    }  # fmt: skip
    costs = {f"cost/{name}": figures.get(name) for name in ("parameters", "train_flops", "step_ms")}
    log_run(run.out / f"seed{seed}" / arm.name, row, costs, score, hparams.options_of_all(run.config))


def save_classifier(run: Session, seed: int, net: str) -> None:
    """Write `classifier.ckpt` beside a net's weights, from which `LitClassifier.load_from_checkpoint` makes it."""
    folder = run.out / f"seed{seed}" / net
    loaded = with_seed(0, lambda: load_net(folder, "out"))
    module = LitClassifier(loaded, run.data.num_classes, seed=seed, **learning(run.config, run.data))
    module.hparams["net"] = read_spec(folder, "out")  # also of a net that is no `lit_modules.nets.Net`
    save_checkpoint(module, folder / "classifier.ckpt")


def log_means(run: Session, nets: Sequence[str]) -> None:
    """Write the TensorBoard runs of methods, over the seeds that have finished all these nets."""
    if run.tensorboard and is_main_process():
        means.log_means(run.out, run.config.seeds, nets)


def wait_for_main() -> None:
    """Where a launcher started the ranks, wait until the first has written its files."""
    if dist.is_initialized():
        dist.barrier()
