"""Launchers: ranks are forked from this process where that is safe, else started as sub-processes."""

import errno
import inspect
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from torch.multiprocessing.spawn import ProcessRaisedException

from apprentice.children import end_with_parent
from strategies.base import failures, fit_state
from strategies.base.private import MultiProcessingLauncher, SubprocessScriptLauncher, TunerExit, WorkerOutput
from strategies.base.ranks import RankStrategy

INTERRUPT_TIME = 30.0  # seconds in which interrupted ranks call their hooks


class ForkLauncher(MultiProcessingLauncher):
    """Lightning's launcher, safe for OpenMP and float64; ranks end with their parent, and return their state.

    An error of a rank is the `__cause__` of torch's ProcessRaisedException, which has its traceback as text.
    """

    _strategy: RankStrategy
    _result: Path  # rank zero's `fit_state`, in a file
    _saving = False  # whether this rank calls the hooks of an exception

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Run `function` in every rank and return rank zero's results."""
        _check_shared_memory()
        self._strategy.check_trainer(trainer)
        if not fit_state.builds_layers(trainer.lightning_module):
            self._strategy.check_module(trainer.lightning_module)
        # The ranks' weights are loaded into this module: another dtype would round them.
        trainer.precision_plugin.convert_module(trainer.lightning_module)
        self._already_fit = False  # Lightning would refuse a second fit, as its launcher does not return loops
        fit_state.prepare_logs(trainer)
        port = os.environ.get("MASTER_PORT")
        self._strategy.bind()
        self.procs = []
        in_main_thread = threading.current_thread() is threading.main_thread()
        forwards = in_main_thread and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        if forwards:
            signal.signal(signal.SIGTERM, self._forward_sigterm)
        try:
            with (
                tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
                self._strategy.without_optimizers(restore=trainer.state.fn != TrainerFn.FITTING),
            ):
                self._result = Path(folder) / "result.pt"
                try:
                    results = super().launch(function, *args, trainer=trainer, **kwargs)
                except ProcessRaisedException as failure:
                    files = [self._error_file(rank) for rank in range(len(self.procs))]
                    reported, cause = failures.first_cause(failure, files)
                    raise reported from cause
                self._restore(trainer, function, args, kwargs)
                return results
        except BaseException as exception:
            if self.procs:  # the ranks have called the hooks that Lightning is about to call here, on an untrained net
                failures.set_hooks_aside(self._strategy, trainer, "callbacks", "loggers", "datamodule")
            if isinstance(exception, KeyboardInterrupt):
                self._interrupt_ranks()
            raise
        finally:  # the next fit takes another port
            if forwards:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
            self._strategy.close_socket()
            os.environ.pop("MASTER_PORT", None)
            if port is not None:
                os.environ["MASTER_PORT"] = port

    def _wrapping_function(self, process_idx: int, *args: Any, **kwargs: Any) -> None:
        if signal.getsignal(signal.SIGTERM) == self._forward_sigterm:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        end_with_parent()
        if process_idx:
            self._strategy.close_socket()  # so that nobody answers when rank 0 has died
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # keeps Lightning from choosing a number
        # With more threads a child hangs in OpenMP once its parent has used them.
        torch.set_num_threads(1)
        # The parent's pool of compilers hangs in a fork: torch.compile shall compile in this process.
        os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
        inductor: Any = sys.modules.get("torch._inductor.config")
        if inductor:  # has read the variable already
            inductor.compile_threads = 1
        # Lightning's handler would call other ranks.
        args[0]._signal_connector._sigterm_notifier_fn = lambda *_: self._handle_sigterm(args[0])
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, _interrupt_once)
        with failures.send_errors(self._error_file(process_idx)):
            try:
                super()._wrapping_function(process_idx, args[0], partial(_run, *args[:2]), *args[2:], **kwargs)
            except BaseException as exception:
                self._call_exception_hooks(args[0], exception)
                raise

    def _error_file(self, process_idx: int) -> Path:
        return self._result.with_name(f"error{process_idx}.pickle")

    def _call_exception_hooks(self, trainer: Trainer, exception: BaseException) -> None:
        """Call what Lightning calls in a process that starts no ranks; in the parent it would find no trained net."""
        ended = trainer.received_sigterm
        self._saving = True
        failures.prepare_hooks(self._strategy, trainer, exception, ends=True)
        call._interrupt(trainer, exception)
        if ended:  # the rank that has failed first says why; this one does where the signal came while it saved
            os._exit(128 + signal.SIGTERM)

    def _handle_sigterm(self, trainer: Trainer) -> None:
        """End at once, as another rank or the run shall end; a rank that saves alone fails and saves first."""
        if self._saving or failures.saves_alone(self._strategy, trainer):
            trainer._signal_connector.received_sigterm = True  # the fit ends at a collective, or with this batch
        else:
            os._exit(128 + signal.SIGTERM)

    def _forward_sigterm(self, *_: Any) -> None:
        """Let the ranks end, and the one that saves alone save, where SIGTERM would end this process and kill them."""
        self.kill(signal.SIGTERM)

    def _interrupt_ranks(self) -> None:
        """Forward an interrupt to the ranks, which have it already if it came from a terminal, and wait for them."""
        self.kill(signal.SIGINT)
        for process in self.procs:
            process.join(INTERRUPT_TIME)
        self.kill(signal.SIGKILL)

    def _collect_rank_zero_results(self, trainer: Trainer, results: Any) -> Any:
        if trainer.should_stop:
            failures.leave_stopped()
        state = fit_state.collect(trainer)
        if self._strategy.local_rank:
            return None
        try:
            torch.save(state, self._result)
        except (OSError, RuntimeError):  # the disk is full; an exception needs a file there too to reach the parent
            self._result.unlink(missing_ok=True)
        return WorkerOutput(None, None, trainer.state, results, {})

    def _recover_results_in_main_process(self, worker_output: Any, trainer: Trainer) -> None:
        trainer.state = worker_output.trainer_state

    def _restore(self, trainer: Any, function: Callable[..., Any], args: Any, kwargs: Any) -> None:
        if not self._result.exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), tempfile.gettempdir())
        # Memory-mapped: unused tensors take no memory.
        state = torch.load(self._result, map_location="cpu", weights_only=False, mmap=True)
        fits = trainer.state.fn == TrainerFn.FITTING
        arguments = inspect.signature(function).bind(*args, **kwargs).arguments
        data = next((value for value in arguments.values() if isinstance(value, LightningDataModule)), None)
        if fits:
            before, loaders = None if data is None else data.trainer, arguments.get("train_dataloaders")
            of_fit = arguments["model"], None if loaders is data else loaders, arguments.get("val_dataloaders")
            trainer._data_connector.attach_data(*of_fit, datamodule=data)
            if data is not None:
                data.trainer = before  # unlike in the ranks: loaders created here are whole
        fit_state.restore(trainer, state, trainer.datamodule if data is None else data)
        if fits and not self._strategy.node_rank:  # other nodes lack the whole state
            self._strategy.create_optimizers = partial(fit_state.make_optimizers, trainer, state)


def _interrupt_once(*_: Any) -> None:
    """Raise KeyboardInterrupt, and ignore further ones while hooks save a checkpoint."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


def _check_shared_memory() -> None:
    """Raise OSError with its place where semaphores, by which ranks talk to their parent, can't be created."""
    try:
        multiprocessing.Lock()
    except OSError as error:
        raise OSError(error.errno, error.strerror, "/dev/shm") from None


class ScriptLauncher(SubprocessScriptLauncher):
    """Lightning's launcher of sub-processes, on a port that no other run can take."""

    def __init__(self, strategy: RankStrategy) -> None:
        super().__init__(strategy.cluster_environment, strategy.num_processes, strategy.num_nodes)
        self._strategy = strategy

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Run `function` here, as in every rank; after an exception Lightning's hooks find what this rank holds."""
        try:
            return super().launch(function, *args, trainer=trainer, **kwargs)
        except TunerExit:  # no failure
            raise
        except BaseException as exception:
            failures.prepare_hooks(self._strategy, trainer, exception, ends=False)
            raise

    def _call_children_scripts(self) -> None:
        self._strategy.bind()
        super()._call_children_scripts()

    def kill_children(self) -> None:
        """Kill the sub-processes that this one has started, and wait for them."""
        children = self.procs.copy()
        self.procs.clear()  # Lightning's observer of them would end this process before it reports
        for child in children:
            child.kill()  # a stopped process takes no other signal
            child.wait()


def _run(trainer: Trainer, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a Trainer's function; the exception by which a Tuner stops it is a normal end, as it is in one process."""
    try:
        return function(*args, **kwargs)
    except TunerExit:
        call._call_teardown_hook(trainer)
        trainer._teardown()
        trainer.state.status, trainer.state.stage = TrainerStatus.FINISHED, None
