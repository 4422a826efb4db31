"""Fits of a run as jobs: what each does, written down by the process that starts it and read by its own.

A job works in the run's folder, and its fits leave there what they leave in one process: records, nets and checkpoints.
"""

import inspect
import os
import pickle
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from apprentice.errors import BadInput
from harness import cli
from harness.jobs.base import Engine, Job, Needs
from harness.jobs.command import Command
from harness.runs import environment, files, launch
from harness.runs.plans import TEACHER, FitPlan
from harness.runs.quiet import notice
from harness.runs.session import Session
from harness.studies.fits import is_finished
from harness.studies.launcher import KEY, VARIABLE, Study

# Of this process's environment, what jobs on other machines have too: it moves bits, or where modules are found.
KEPT = ("ATEN_", "CUBLAS_", "DNNL_", "GOMP_", "KMP_", "MKL_", "OMP_", "ONEDNN_", "PYTHON", "TORCH_")


@dataclass(frozen=True)
class Work:
    """What a job does."""

    config: Namespace  # the settings, of a search its own
    root: Path  # the run's folder
    out: Path  # where the fits are: this folder, or that of the search
    plans: tuple[FitPlan, ...]
    versions: dict[str, str]  # of the process that starts it
    device: str  # the type on which it would train there, as cpu or cuda


def build_launcher(session: Session) -> Engine:
    """Make the chosen engine; BadInput if it can't be used here."""
    chosen = vars(session.config)[KEY]
    launcher: Engine = cli.build(chosen, KEY)
    launcher.check()
    place, nodes = launch.find_launch(), session.config.trainer.init_args["num_nodes"]
    if place is not None and place.size > 1:
        raise BadInput(KEY, chosen.name.lower(), f"one process that starts jobs; {place.by} started {place.size}")
    if nodes > 1:
        raise BadInput("trainer.num_nodes", nodes, f"1 beside `{KEY}`: a job has one machine")
    return launcher


def run_fits(session: Session, launcher: Engine, study: Callable[..., Any], plans: Sequence[FitPlan]) -> None:
    """Do `Launcher.run`."""
    folder = (session.out / environment.JOBS).absolute()
    root = Path(os.environ[files.RUN])
    folder.mkdir(exist_ok=True)
    shared = {name: value for name, value in os.environ.items() if name.startswith(KEPT)}
    shared["OMP_NUM_THREADS"] = str(torch.get_num_threads())  # their number changes bits
    words = (sys.executable, inspect.getfile(study), *cli.argv_of({"out": root, "resume": "true"}))
    jobs, needs = [], count_needs(session)
    for name, of_job, after in divide([plan for plan in plans if not is_finished(session, plan)]):
        path = folder / f"{name}.work"
        fits_in = session.out.absolute()
        work = Work(session.config, root, fits_in, of_job, environment.versions(), needs.device)
        files.write_bytes(path, pickle.dumps(work))
        for suffix in (".log", ".lock"):
            files.record(path.with_suffix(suffix))
        variables = {**shared, VARIABLE: str(path)}
        jobs.append(Job(name, Command(words, str(Path.cwd()), str(path.with_suffix(".log")), variables), after))
    if not jobs:
        return
    limit = launcher.limit(needs)
    at_once = "" if limit is None or limit >= len(jobs) else f", {limit} at a time"
    notice(f"{type(launcher).__name__.lower()}: {len(jobs)} jobs{at_once}; their output is in {folder}/*.log")
    launcher.run_jobs(jobs, folder / type(launcher).__name__.lower(), needs)
    for path in folder.glob("*.work"):
        path.unlink()
    machines = {environment.describe(machine) for machine in environment.machines(session.out)}
    if len(machines) > 1:
        notice(f"jobs ran on {'; '.join(sorted(machines))}: bits and times may differ between these")


def divide(plans: Sequence[FitPlan]) -> Iterator[tuple[str, tuple[FitPlan, ...], str | None]]:
    """Yield the jobs of fits: each with its name, its fits in order, and the name of the job that it waits for.

    A seed's teachers are one job. Its students follow them, in their job if they are one fit.
    """
    for seed in dict.fromkeys(plan.seed for plan in plans):
        teachers, others = list[FitPlan](), list[FitPlan]()
        for plan in plans:
            if plan.seed == seed:
                (teachers if plan.name.partition("-")[0] == TEACHER else others).append(plan)
        if teachers and len(others) == 1:
            yield f"seed{seed}", (*teachers, *others), None
            continue
        first = f"seed{seed}-{TEACHER}"
        if teachers:
            yield first, tuple(teachers), None
        for plan in others:
            yield f"seed{seed}-{plan.name}", (plan,), first if teachers else None


def count_needs(session: Session) -> Needs:
    """Return the cores and GPUs of this machine that a job takes."""
    trainer = session.trainer()
    devices, ranks = session.config.trainer.init_args["devices"], trainer.num_devices
    device = trainer.strategy.root_device.type
    if device != "cuda":
        return Needs(ranks if ranks > 1 else torch.get_num_threads(), device=device)
    return Needs(ranks, ranks if isinstance(devices, int) else torch.cuda.device_count(), device)


def do_work(session: Session, study: Callable[[Session], Study]) -> None:
    """Do `do_job`, in the run's folder; another process of the same job ends first.

    Raises:
        BadInput: this machine has other versions than the one that started the job, or no GPU for a job of one.
    """
    path = Path(os.environ[VARIABLE])
    work: Work = pickle.loads(path.read_bytes())
    if other := [f"{name} {here}" for name, here in environment.versions().items() if here != work.versions[name]]:
        expected = ", ".join(f"{name.split()[0]} {work.versions[name.split()[0]]}" for name in other)
        raise BadInput(KEY, path.stem, f"{expected}, as where it was started; this machine has {', '.join(other)}")
    inner = session.with_settings(**vars(work.config))
    inner.out = work.out
    with _alone(path), files.record_files(work.root, path.stem):
        files.write_json(path.with_suffix(".json"), environment.hardware())
        _check_device(inner.checked_trainer().strategy.root_device.type, work.device, path.stem)
        comparison = study(inner)
        for plan in work.plans:
            comparison.fit(plan)


def _check_device(here: str, there: str, job: str) -> None:
    """Raise BadInput if a run on GPUs has none here; tell of another device, as a run may start where there is none."""
    if here == "cpu" != there:
        raise BadInput(f"{KEY}.gpus", 0, f"1 or more, as {job} was started for {there}; this machine gives it none")
    if here != there:
        notice(f"{job} trains on {here}; where it was started, it would on {there}")


@contextmanager
def without_jobs(session: Session, plan: FitPlan) -> Iterator[None]:
    """Hold the locks of a seed's jobs during a fit that is not finished."""
    first = f"seed{plan.seed}"
    paths = [] if is_finished(session, plan) else sorted((session.out / environment.JOBS).glob("*.lock"))
    locks = [path for path in paths if path.stem.partition("-")[0] == first]
    with ExitStack() as held:
        if locks:
            with launch.main_first(f"jobs {first} {plan.name}"):
                for path in locks:
                    held.enter_context(_alone(path))
        yield


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Hold the job's lock, which one that lost its engine may still have; its ranks hold none."""
    if not launch.is_main_process():
        yield
        return
    lock = FileLock(path.with_suffix(".lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        notice(f"another process of {path.stem} still runs; this one waits for it")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()
