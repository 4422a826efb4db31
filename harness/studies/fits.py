"""Fits of an experiment: each leaves its nets, a record and rows in TensorBoard, and is not repeated."""

from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.multiprocessing.spawn import ProcessExitedException

from apprentice.keyed import with_seed
from harness.reports.hparams import log_row
from harness.runs import safepoints, signals
from harness.runs.callbacks import drop_unsuited
from harness.runs.files import atomic
from harness.runs.launch import is_main_process, main_first
from harness.runs.nets import AVERAGE, load_net, read_spec, save_checkpoint, save_net
from harness.runs.plans import Arm, FitOutcome, FitPlan, of_teacher
from harness.runs.progress import Show, Speed, estimate_rest, progress
from harness.runs.quiet import notice, quiet
from harness.runs.records import FitRecord, NetRecord
from harness.runs.safepoints import AtomicCheckpointIO, SafePoints, Until
from harness.runs.session import Session
from harness.runs.teacher_weights import BY_TEACHER, TEACHER, teacher_row_name
from harness.runs.tensorboard import RunsLogger
from harness.runs.trainer import finish_runs
from harness.runs.training_options import scheduler_factory
from harness.studies import costs
from harness.studies.choices import is_from_teacher, judged_by, learner_options, net_spec, trained_spec
from lit_modules.classifier import LitClassifier
from lit_modules.distillation import Distillation
from lit_modules.nets.identity import configurations
from lit_modules.run_callbacks import BestEpoch, StopRuns
from lit_modules.schedules import follows_length
from lit_modules.training.loop import Loop

LONG = 60.0  # seconds of a fit whose steps may take long to time


Measure = Callable[[FitPlan, Loop, Arm, str, FitOutcome], NetRecord]  # of an arm, which is this run of the module


def fit(
    session: Session,
    plan: FitPlan,
    build: Callable[[FitPlan], Loop],
    plans: Sequence[FitPlan] = (),
    measure: Measure | None = None,
) -> FitRecord:
    """Run a plan: fit, test, export nets, measure costs. Return the record; that of a finished fit is read.

    A fit that was finished with fewer epochs goes on from its last checkpoint, if that was kept, and else starts again:
    the bits are the same. A module that is a single run trains the plan's only arm. `plans` are all fits of the run;
    `measure` takes scores and costs of an arm, in place of `costs.measure`.

    Raises:
        Interrupted: the user asked to stop; the checkpoint has what was trained.
    """
    path, checkpoint = plan.record(session.out), plan.checkpoint(session.out)
    before = FitRecord.read(path) if path.exists() else None
    if before is not None and is_finished(session, plan):
        if is_main_process() and not plan.keeps_checkpoint:
            checkpoint.unlink(missing_ok=True)  # the process may have been killed just before
        return before
    with main_first(f"seed{plan.seed} {plan.name}"):
        extended = _extends(session, plan, before.max_epochs if before else None)
    session.data.order_seed, session.data.hides_labels = plan.seed, not plan.all_labels
    module = build(plan)
    trained = [(arm, module.net_of(run_of(module, arm))) for arm in plan.arms]
    exports = [  # before a strategy changes the net's class
        (arm, net, trained_spec(session, arm.net, net, next(iter(arm.teachers)))) for arm, net in trained
    ]
    show = progress(f"seed {plan.seed} {plan.name:8}", estimate_rest(session.out, plans, plan))
    score = judged_by(session.config, session.data).score
    outcome = fit_and_test(session, plan, module, score, extended, show)
    record = FitRecord(outcome.seconds, plan.epochs)
    if isinstance(module, Distillation):
        record = replace(record, teacher_samples=module.teacher_samples, teacher_stored=module.teacher_stored)
    if is_main_process():
        module.to(outcome.device)  # a fit on a GPU ends on the CPU
        for arm, net, spec in exports:
            if plan.tested and outcome.seconds is not None and outcome.seconds > LONG:
                notice(f"seed {plan.seed} {plan.name:8}  timing a step of {arm.name}")
            part = run_of(module, arm)
            record.nets[arm.name] = (
                costs.measure(module, arm, part, outcome, session.data)
                if measure is None
                else measure(plan, module, arm, part, outcome)
            )
            chosen = net_spec(session, arm.net)["class_path"]
            if spec["class_path"] != chosen and not is_from_teacher(session.config, arm.net):
                record.nets[arm.name] = replace(record.nets[arm.name], net=type(net).__name__)
            if plan.until is None:  # else the fit goes on
                _export(session, plan, module, arm, net, spec)
            if session.tensorboard:
                log_row(session, plan.seed, arm, spec, record.nets[arm.name].figures, score)
        record.write(path)
        if not plan.keeps_checkpoint:
            checkpoint.unlink(missing_ok=True)
    wait_for_main()
    return record


def _export(session: Session, plan: FitPlan, module: Loop, arm: Arm, net: nn.Module, spec: dict[str, Any]) -> None:
    """Write an arm's net, and the average of its weights, into its folder."""
    taught_by = {} if arm.teachers == BY_TEACHER else {teacher_row_name(key): w for key, w in arm.teachers.items()}
    facts = replace(session.net_facts(), taught_by=taught_by, configuration=configurations(net))
    folder = plan.folder(session.out) / arm.name
    save_net(net, spec, folder, facts)
    if isinstance(module, Distillation) and (average := module.average_of(arm.name)) is not None:
        save_net(average, spec, folder / AVERAGE, facts)


def is_finished(session: Session, plan: FitPlan) -> bool:
    """Return whether a fit's record is there, of as many epochs."""
    path = plan.record(session.out)
    return path.exists() and FitRecord.read(path).max_epochs == plan.epochs


def _extends(session: Session, plan: FitPlan, done: int | None) -> bool:
    """Return whether the checkpoint is of a fit of fewer epochs, from which the planned one goes on.

    Deletes the checkpoint if none can. `done` are the epochs of the fit's record.
    """
    checkpoint = plan.checkpoint(session.out)
    points = safepoints.read(checkpoint)["callbacks"]["SafePoints"] if checkpoint.exists() else {}
    had: int | None = points.get("max_epochs")
    if plan.epochs is None or had == plan.epochs or (had is None and done is None):
        return False
    why = "" if had else "the folder has no checkpoint of it"
    if session.config.trainer.init_args["callbacks"]:
        why = "callbacks may depend on the number of epochs"
    elif (rates := vars(session.config).get("scheduler")) and follows_length(scheduler_factory(rates, "scheduler")):
        why = f"{rates.name} depends on the number of epochs"
    elif had == 1:
        why = "a teacher's outputs are stored from two epochs on"
    if is_main_process():
        how = f"starts again, as {why}; the result is the same" if why else "goes on"
        print(f"{plan.label}: from {done or had} to {plan.epochs} epochs; {how}", flush=True)
        if why:
            checkpoint.unlink(missing_ok=True)
    return not why


def fit_and_test(
    session: Session, plan: FitPlan, module: Loop, score: str = "acc", extended: bool = False, show: Show | None = None
) -> FitOutcome:
    """Fit the module, from its checkpoint if there is one, then, if it is to be tested, test its last weights once.

    The module ends with the trained weights in this process, even if the trainer started others. Nets are judged by the
    validation's `score`; `extended` says that a finished fit goes on, as its Trainer has more epochs now.

    Raises:
        Interrupted: the user asked to stop; the checkpoint has what was trained.
    """
    folder, checkpoint = plan.folder(session.out), plan.checkpoint(session.out)
    loggers = session.loggers(f"{folder.name}/{plan.name}")
    state = safepoints.read(checkpoint) if checkpoint.exists() else None
    if state is not None:
        safepoints.load(module, state, checkpoint)  # before ranks are started, one of which would fail alone

    def trainer(purge_step: int = 0, part: str = "", **kwargs: Any) -> Trainer:
        runs = [arm.name for arm in plan.arms]
        curves = [RunsLogger(folder, runs, plan.name, purge_step, part, score)] if session.tensorboard else []
        kwargs |= {**plan.trainer, "logger": [*curves, *loggers] or False, "plugins": [AtomicCheckpointIO()]}
        return session.trainer(**kwargs, **({"show": show} if show else {}))

    with quiet():
        if not plan.is_trained and not _is_finished(module, state, extended):
            with _stop_after_save():
                callbacks = [SafePoints(checkpoint, session.config.checkpoint_every), Speed()]
                callbacks += [*run_callbacks(session.config), *([] if plan.until is None else [Until(plan.until)])]
                epochs: dict[str, Any] = {} if plan.epochs is None else {"max_epochs": plan.epochs}
                purge_step = state["global_step"] if state else 0
                fitting = trainer(purge_step, enable_checkpointing=True, callbacks=callbacks, **epochs)
                drop_unsuited(session, plan.label, module, fitting)
                for callback in fitting.checkpoint_callbacks:  # the user's, unless placed elsewhere
                    if isinstance(callback, ModelCheckpoint) and callback.dirpath is None:
                        callback.dirpath = str(folder / "checkpoints" / plan.name)
                resumed: dict[str, Any] = {"ckpt_path": str(checkpoint), "weights_only": True} if state else {}
                fitting.fit(module, session.data, **resumed)
            state = safepoints.read(checkpoint)
        if state is not None:
            safepoints.load(module, state, checkpoint, best=True)
        path = checkpoint.with_suffix(".samples")
        only_test: dict[str, Any] = {"enable_checkpointing": False, "enable_model_summary": False, "profiler": None}
        testing = trainer(part=".test", callbacks=[SampleWriter(path)], **only_test)
        scores = dict(testing.test(module, session.data, verbose=False)[0]) if plan.tested else {}
        testing.strategy.barrier()
        finish_runs(loggers)
    samples: dict[str, dict[str, Tensor]] = {}
    if is_main_process() and path.exists():
        samples = torch.load(path)
        path.unlink()
    points = state["callbacks"]["SafePoints"] if state else {"seconds": None, "epochs": None}
    device, forward = testing.strategy.root_device, testing.strategy.precision_plugin.forward_context
    best = {name: entry["epoch"] for name, entry in (safepoints.best_of(state) if state else {}).items()}
    return FitOutcome(points["seconds"], points["epochs"], scores, device, forward, samples, best)


def _is_finished(module: Loop, state: Mapping[str, Any] | None, extended: bool) -> bool:
    """Return whether a checkpoint's fit has ended, and if more epochs are planned, by runs that all have stopped."""
    if state is None or not state["callbacks"]["SafePoints"]["finished"]:
        return False
    return bool(not extended or {*module.failed, *module.stopped} >= {*module.runs})


def run_callbacks(config: Namespace) -> list[Callback]:
    """Make the callbacks of `best_epoch` and the like, in an experiment that has them."""
    settings, callbacks = vars(config), list[Callback]()
    if (monitor := settings.get("best_epoch")) is not None:
        callbacks.append(BestEpoch(monitor))
    if (monitor := settings.get("early_stopping")) is not None:
        callbacks.append(StopRuns(monitor, settings["patience"]))
    return callbacks


@contextmanager
def _stop_after_save() -> Iterator[None]:
    """Defer signals during a fit; raise Interrupted if it ended on account of one, in one process or many."""
    try:
        with signals.defer_signals():
            yield
    except (SystemExit, ProcessExitedException) as stop:
        if isinstance(stop, ProcessExitedException) or stop.code == signals.SAVED:
            signals.stop_if_requested()
        raise
    signals.stop_if_requested()


class SampleWriter(Callback):
    """Writes the values of single samples to a file, as ranks end with a test."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if isinstance(pl_module, Loop):
            values = pl_module.run_scores.of_samples(pl_module.failed)
            if trainer.is_global_zero:
                self.path.parent.mkdir(parents=True, exist_ok=True)  # of a loaded net nothing has been written yet
                with atomic(self.path) as temporary:
                    torch.save(values, temporary)


def run_of(module: Loop, arm: Arm) -> str:
    """Return the name of an arm's run in a module of several, "" in a module that is one run."""
    return arm.name if arm.name in module.runs else ""


def wait_for_main() -> None:
    """Where a launcher started the ranks, wait until the first has written its files."""
    if dist.is_initialized():
        dist.barrier()


def save_classifier(session: Session, seed: int, net: str) -> None:
    """Write `classifier.ckpt` beside a net's weights, from which `LitClassifier.load_from_checkpoint` makes it."""
    folder = session.out / f"seed{seed}" / net
    loaded = with_seed(0, lambda: load_net(folder, "out"))
    config = of_teacher(session.config) if net.partition("-")[0] == TEACHER else session.config
    module = LitClassifier(loaded, session.data.num_classes, seed=seed, **learner_options(config, session.data))
    module.hparams["net"] = read_spec(folder, "out")  # also of a net that is no `lit_modules.nets.Net`
    save_checkpoint(module, folder / "classifier.ckpt")
