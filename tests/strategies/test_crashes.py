"""A fit that fails: hooks run in the ranks that have trained, so that a crash checkpoint holds what they had."""

import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from torch.multiprocessing import ProcessRaisedException

from apprentice.children import end_with_parent
from apprentice.errors import BadInput
from harness.runs.quiet import quiet
from lab.strategies import ParamServer
from strategies import DDP, FSDP, DataParallel, PipelineStrategy, ZeRO1
from tests.grids import mostly_slow
from tests.processes import CONTEXT, Run, launch
from tests.strategies.test_second_launch import NAMES, WHOLE, Data, Regression
from tests.training import LinesLogger, assert_same, on, trainer, weights

pytestmark = pytest.mark.filterwarnings(
    "ignore:Using `DistributedSampler`", "ignore:Checkpoint directory", "ignore:.*ckpt_path"
)
SAVES: dict[str, Any] = {"enable_checkpointing": True}
STEP = 3  # of six
EXACT = {"ddp", "ddp_zero1", "ddp_ring", "ddp_allreduce", "fsdp", "hsdp", "param_server", "pipeline", "model_parallel"}


class Crash(Callback):
    """Fails when so many steps are done, on one rank or on all; or a signal comes to the rank or to its parent."""

    def __init__(self, rank: int | None = None, signum: int | None = None, to_parent: bool = False) -> None:
        self.rank, self.signum, self.to_parent = rank, signum, to_parent

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == STEP and self.rank in {None, trainer.global_rank}:
            if self.signum is None:
                raise LookupError("a bug")
            os.kill(os.getppid() if self.to_parent else os.getpid(), self.signum)
            if self.to_parent:  # until the signal comes back
                while not trainer.received_sigterm:
                    time.sleep(0.01)


class Hooks(Callback):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        (self.folder / f"{trainer.global_rank}.hook").open("a").write(f"{os.getpid()} {exception!r}\n")


class Finalized(LinesLogger):
    def finalize(self, status: str) -> None:
        self.path.with_suffix(".finalized").open("a").write(f"{os.getpid()} {status}\n")


def running(strategy: Any, **options: Any) -> Trainer:
    return trainer(2 if strategy else 1, strategy=strategy or "auto", max_epochs=6, precision="64-true", **options)


def fit(strategy: Any, rows: int, callbacks: list[Callback] | None = None, **options: Any) -> Regression:
    module = Regression()
    with quiet():
        running(strategy, callbacks=callbacks or []).fit(module, Data(rows), **options)
    return module


def saving(folder: Path) -> list[Callback]:
    return [OnExceptionCheckpoint(folder), ModelCheckpoint(folder, "kept", save_top_k=0, save_on_exception=True)]


def crash(name: str, folder: Path, fault: Crash) -> None:
    callbacks = [fault, *saving(folder), Hooks(folder)]
    logger = Finalized(folder / "lines")
    here = running(on(f"{name} 2")["strategy"], callbacks=callbacks, logger=logger, **SAVES)
    with quiet(), pytest.raises(Exception, match=r"a bug|SIGKILL|exit code 143"):
        here.fit(Regression(), Data(16 if name in WHOLE else 8))
    assert {*callbacks} <= {*here.callbacks}
    assert len(here.loggers) == 1
    for path in [*folder.glob("*.hook"), *folder.glob("*.finalized")]:
        assert f"{os.getpid()} " not in path.read_text()


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, torch.Tensor]:
    return weights(fit(None, 16))


def check(folder: Path, name: str, right: dict[str, torch.Tensor], late: int = 0) -> None:
    """Crash checkpoints have all steps, and a fit that resumes from one ends like the undisturbed one."""
    found = {path.name: torch.load(path, weights_only=False) for path in folder.glob("*.ckpt")}
    assert found.keys() == {"on_exception.ckpt", "kept.ckpt"}
    for state in found.values():
        steps = state["global_step"]
        assert steps in {STEP, STEP + late}
        assert {int(values["step"]) for values in state["optimizer_states"][0]["state"].values()} == {steps}
    if name in EXACT:
        strategy, rows = on(f"{name} 2")["strategy"], 16 if name in WHOLE else 8
        again = fit(strategy, rows, ckpt_path=folder / "on_exception.ckpt", weights_only=False)
        assert_same(weights(again), right, atol=1e-9)


CRASHING = [name for name in NAMES if name not in {"ddp_allreduce", "ddp_ring", "ddp_powersgd", "model_parallel"}]


@pytest.mark.parametrize("name", mostly_slow(CRASHING, "ddp", "fsdp"))
def test_a_crash_of_all_ranks_keeps_the_steps(name: str, tmp_path: Path, undisturbed: dict[str, torch.Tensor]) -> None:
    crash(name, tmp_path, Crash())
    assert len(list(tmp_path.glob("*.hook"))) == 2
    check(tmp_path, name, undisturbed)


DIES = [("ddp", 0, None), ("ddp", 1, None), ("ddp", 1, signal.SIGKILL), ("ddp_allreduce", 0, None),
        ("ddp_ring", 1, signal.SIGKILL)]  # fmt: skip


@pytest.mark.parametrize(("name", "rank", "signum"), mostly_slow(DIES, *DIES[:3]))
def test_a_rank_that_crashes_keeps_the_steps(
    name: str, rank: int, signum: int | None, tmp_path: Path, undisturbed: dict[str, torch.Tensor]
) -> None:
    crash(name, tmp_path, Crash(rank, signum))
    check(tmp_path, name, undisturbed)


class SavesLong(Callback):
    """On rank 0, until the others are gone and the process that forked it wants it to end."""

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        while trainer.is_global_zero and not trainer.received_sigterm:
            time.sleep(0.01)


def test_the_rank_that_failed_says_why_though_another_ended_first(tmp_path: Path) -> None:
    here = running(
        on("ddp_allreduce 2")["strategy"], callbacks=[Crash(rank=0), SavesLong(), *saving(tmp_path)], **SAVES
    )
    with quiet(), pytest.raises(ProcessRaisedException, match=r"Process 0 (?s:.*)LookupError: a bug") as raised:
        here.fit(Regression(), Data(8))
    assert isinstance(raised.value.__cause__, LookupError)
    assert {path.name for path in tmp_path.glob("*.ckpt")} == {"on_exception.ckpt", "kept.ckpt"}


@pytest.mark.parametrize("strategy", mostly_slow([ZeRO1, FSDP, PipelineStrategy, ParamServer], ZeRO1))
def test_what_no_rank_has_all_of_is_not_saved_by_one(strategy: type[DataParallel], tmp_path: Path) -> None:
    here = running(strategy(timeout=60), callbacks=[Crash(rank=1), OnExceptionCheckpoint(tmp_path)], **SAVES)
    line = f"on_exception of callbacks was not called: {strategy.__name__} saves with all ranks or not at all"
    with quiet(), pytest.raises(Exception, match=f"(?s)LookupError: a bug.*{line}"):
        here.fit(Regression(), Data(8))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("signum", mostly_slow([signal.SIGINT, signal.SIGTERM], signal.SIGINT))
def test_a_parents_signal_reaches_ranks(signum: int, tmp_path: Path, undisturbed: dict[str, torch.Tensor]) -> None:
    def main() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever has started the tests may ignore it
        crash("ddp", tmp_path, Crash(0, signum, to_parent=True))

    run = Run(main, log=tmp_path / "log")
    assert run.wait() == (1 if signum == signal.SIGINT else 0), run.output
    check(tmp_path, "ddp", undisturbed, late=1)


def test_a_launchers_rank_that_fails_waits_for_nobody(tmp_path: Path, undisturbed: dict[str, torch.Tensor]) -> None:
    def main(rank: int, folder: Path) -> None:
        with quiet():
            running(DDP(timeout=60), callbacks=[Crash(rank=0), *saving(folder)], **SAVES).fit(Regression(), Data(8))

    runs = launch(main, tmp_path)
    assert all(run.wait(30) for run in runs)
    assert "LookupError: a bug" in runs[0].output
    check(tmp_path, "ddp", undisturbed)


@pytest.mark.slow
def test_ranks_of_a_launcher_that_fail_together_fit_again(tmp_path: Path) -> None:
    def main(rank: int, folder: Path) -> None:
        here = running(DDP(timeout=60), callbacks=[Crash(), *saving(folder)], **SAVES)
        with quiet():
            with pytest.raises(LookupError):
                here.fit(Regression(), Data(8))
            here.validate(Regression(), Data(8), verbose=False)

    runs = launch(main, tmp_path)
    assert [run.wait() for run in runs] == [0, 0], "".join(run.output for run in runs)


class Raises(Callback):
    def __init__(self, error: Exception) -> None:
        self.error = error

    def on_train_start(self, trainer: Trainer, module: Any) -> None:
        if trainer.global_rank == 1:
            raise self.error


class LocalError(Exception):
    """Can't be pickled, as it holds a lock."""

    def __init__(self) -> None:
        super().__init__("of a lock")
        self.lock = threading.Lock()


@pytest.mark.parametrize("error", [BadInput("data.root", 3, "a folder"), LocalError()], ids=["pickled", "as text"])
def test_the_error_of_a_rank_arrives_as_an_object(error: Exception) -> None:
    with quiet(), pytest.raises(ProcessRaisedException, match=str(error)) as raised:
        trainer(2, strategy=DDP(), callbacks=[Raises(error)]).fit(Regression(), Data())
    cause = raised.value.__cause__
    if isinstance(error, BadInput):
        assert isinstance(cause, BadInput)
        assert (cause.argument, cause.value, cause.expected) == (error.argument, str(error.value), error.expected)
    else:
        assert cause is None


def fork_and_die(survived: Path) -> None:
    def outlive() -> None:
        parent = multiprocessing.parent_process()
        while parent is not None and os.getppid() == parent.pid:
            time.sleep(0.01)
        end_with_parent()
        survived.touch()

    CONTEXT.Process(target=outlive).start()
    os._exit(0)


def test_a_rank_whose_parent_died_before_it_began_ends(tmp_path: Path) -> None:
    assert Run(fork_and_die, tmp_path / "survived", log=tmp_path / "log").wait() == 0
    assert not (tmp_path / "survived").exists()
