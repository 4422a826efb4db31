"""What all data-parallel strategies share: how ranks start and end."""

import multiprocessing
from datetime import timedelta
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.utilities import rank_zero_info

from strategies import roll_call
from strategies.launchers import ForkLauncher

StartMethod = Literal["auto", "fork", "spawn", "popen"]


class DataParallel(DDPStrategy):
    """Lightning's DDPStrategy with ranks that are forked where that is safe, and faults that are named.

    A forked rank starts in a second where a sub-process imports everything again (8 ranks: 10 s against 80 s).

    Args:
        start_method: "fork", "spawn", "popen" (sub-processes), or "auto": fork on CPU, sub-processes otherwise. Where a
            launcher has started the ranks already (torchrun, SLURM, MPI), none is started.
        timeout: seconds a rank may keep the others waiting.
        process_group_backend: gloo, nccl or another of torch's; when not given, the one that fits the devices.

    Raises:
        ValueError: an option's value can't be used, alone or with these devices.
    """

    def __init__(
        self,
        start_method: StartMethod = "auto",
        timeout: float = 1800.0,
        process_group_backend: str | None = None,
    ) -> None:
        if not timeout > 0:
            raise ValueError(f"timeout {timeout}: expected seconds, above 0")
        super().__init__(timeout=timedelta(seconds=timeout), process_group_backend=process_group_backend)
        self.start_method = start_method

    # Starting

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        self._check_devices()
        method = self._resolved_start_method()
        if method == "popen" or self.cluster_environment.creates_processes_externally:
            launcher = _SubprocessScriptLauncher(self.cluster_environment, self.num_processes, self.num_nodes)
            self._launcher = launcher
        else:
            self._start_method = method
            self._launcher = ForkLauncher(self, start_method=method)

    def _check_devices(self) -> None:
        """Raise ValueError, before anything is started, where an option does not go with these devices."""
        if self._process_group_backend == "nccl" and self.root_device.type != "cuda":
            raise ValueError("process_group_backend nccl: expected gloo, as there are no GPUs in use")
        environment, devices = self.cluster_environment, self.num_processes * self.num_nodes
        assert environment is not None
        if environment.creates_processes_externally and environment.world_size() != devices:
            started = environment.world_size()
            wanted = f"{started / self.num_nodes:g} on each of {self.num_nodes} nodes, as {started} ranks were started"
            raise ValueError(f"devices {self.num_processes}: expected {wanted}")

    def _resolved_start_method(self) -> Any:
        if self.start_method != "auto":
            return self.start_method
        if self.root_device.type != "cpu":
            return "popen"
        forks = "fork" in multiprocessing.get_all_start_methods()
        if forks and not torch.cuda.is_initialized():
            return "fork"
        why = "CUDA is in use in this process" if forks else "this platform has no fork"
        rank_zero_info(f"{why}: ranks are started as sub-processes, each of which imports everything again")
        return "popen"

    def check_module(self, module: LightningModule) -> None:
        """Raise ValueError where the module can't be trained so; asked before ranks are forked, and in each of them."""

    def check_trainer(self, trainer: Trainer) -> None:
        """Raise ValueError where the Trainer's settings can't be kept so; asked when `check_module` is."""

    # Ending

    def on_exception(self, exception: BaseException) -> None:
        """Where others fell silent, name them: the error that came of it says only that a connection did.

        Raises:
            TimeoutError: a rank kept the others waiting for too long.
            ConnectionError: a rank has died.
        """
        super().on_exception(exception)
        assert self._timeout is not None
        try:
            roll_call.raise_for_absent(exception, self._timeout.total_seconds())
        except (TimeoutError, ConnectionError):
            if isinstance(self._launcher, _SubprocessScriptLauncher):
                children = self._launcher.procs.copy()
                self._launcher.procs.clear()  # Lightning's observer of them would end this process before it has spoken
                for child in children:
                    child.kill()  # one that is stopped takes no other signal
                    child.wait()
            if self.lightning_module is not None:
                self.teardown()  # which Lightning would call next, had this error not come in between
            raise
