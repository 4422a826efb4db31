"""What all data-parallel strategies share: how ranks start and end."""

import atexit
import multiprocessing
import os
import socket
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.fabric.utilities.data import _auto_add_worker_init_fn
from lightning.fabric.utilities.distributed import _destroy_dist_connection
from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states, reset_seed
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import Tensor, nn
from torch.optim import Optimizer

from strategies.base import missing_ranks, rendezvous, stores
from strategies.base.launchers import ForkLauncher, ScriptLauncher

StartMethod = Literal["auto", "fork", "spawn", "popen"]


class DataParallel(DDPStrategy):
    """Lightning's DDPStrategy with ranks that are forked where that is safe, and faults that are named.

    A forked rank starts in a second where a sub-process imports everything again (8 ranks: 10 s against 80 s). When the
    ranks have ended, the Trainer that forked them has what they save, and logs on where they did: see `fit_state`.

    Args:
        start_method: "fork", "spawn", "popen" (sub-processes), or "auto": fork on CPU, sub-processes otherwise. Where a
            launcher has started the ranks already (torchrun, SLURM, MPI), none is started.
        timeout: seconds a rank may keep the others waiting, at the start too, or a timedelta; None: half an hour.
        process_group_backend: gloo, nccl or another of torch's; when not given, the one that fits the devices.
        init_method: where ranks meet: tcp://HOST:PORT, an address of rank 0's; file:///PATH, a file that all can write;
            env://, or not given: where MASTER_ADDR and MASTER_PORT or the launcher say, else at a free port.
        accelerator: as DDPStrategy's, and so are the others; the Trainer gives what is not given here.
        parallel_devices: one for each rank of this node.
        cluster_environment: who has started the ranks, and where they meet.
        checkpoint_io: how checkpoints are written.
        precision_plugin: how numbers are rounded.
        **unknown: none is taken.

    Raises:
        TypeError: an argument that the class does not take.
        ValueError: an option's value can't be used, alone or with these devices.
    """

    _make: Callable[[], None] | None = None

    def __init__(
        self,
        start_method: StartMethod = "auto",
        timeout: float | timedelta | None = 1800.0,
        process_group_backend: str | None = None,
        init_method: str | None = None,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        **unknown: Any,
    ) -> None:
        self._refuse(unknown)
        limit = timeout if isinstance(timeout, timedelta) else timedelta(seconds=1800.0 if timeout is None else timeout)
        if not limit > timedelta():
            raise ValueError(f"timeout {timeout}: expected seconds, above 0")
        stores.check(init_method)
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            timeout=limit,
            process_group_backend=process_group_backend,
        )
        self.start_method, self.init_method = start_method, init_method
        self._listening: socket.socket | None = None  # rank 0's, made before the ranks that are started here
        self._averaged: set[nn.Parameter] | None = None  # whose gradients are; None: whichever there are, or none

    def _refuse(self, arguments: Collection[str], *own: str) -> None:
        """Raise TypeError for arguments that the class that was called does not take: all, or `own`, which it sets."""
        for name in own or arguments:
            if name in arguments:
                raise TypeError(f"{type(self).__name__}(...) got an unexpected argument {name!r}")

    # Starting

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        self._check_devices()
        method = self._resolved_start_method()
        if method == "popen" or self.cluster_environment.creates_processes_externally:
            self._launcher = ScriptLauncher(self)
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

    def _refuse_callbacks(self, trainer: Trainer, kinds: tuple[type[Callback], ...], expected: str) -> None:
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        if found := [callback for callback in callbacks if isinstance(callback, kinds)]:
            raise ValueError(f"callbacks {type(found[0]).__name__}: expected {expected}")

    # Meeting

    def listen(self) -> None:
        """Take a port for rank 0, before ranks are started: no other run on this machine can come between."""
        environment = self.cluster_environment
        assert environment is not None
        if self.init_method not in stores.BY_ENVIRONMENT:
            return
        chooses = type(environment).main_port is LightningEnvironment.main_port  # if nobody does, a port that was free
        port = os.environ.get("MASTER_PORT", "0") if chooses else str(environment.main_port)
        self._listening = stores.listen(environment.main_address, int(port), f"MASTER_PORT {port}")
        os.environ["MASTER_PORT"] = str(self._listening.getsockname()[1])
        if isinstance(environment, LightningEnvironment):
            environment._main_port = self._listening.getsockname()[1]  # it would go on with the last launch's

    def stop_listening(self) -> None:
        """Let go of the port, which rank 0's store holds by now, or of a copy of it."""
        if self._listening is not None:
            self._listening.close()
            self._listening = None

    def join(self) -> None:
        """Meet the other ranks where a launcher has started them, before anything else is done."""
        assert self.cluster_environment is not None
        if self.cluster_environment.creates_processes_externally:
            assert self.accelerator is not None
            self.accelerator.setup_device(self.root_device)
            self.setup_distributed()

    def setup_distributed(self) -> None:
        """Join the process group, unless this process has.

        Raises:
            TimeoutError: nobody answers, or someone has not come.
            ConnectionError: the port or the file can't be used, or a rank is there twice.
        """
        reset_seed()
        self.set_world_ranks()
        self._process_group_backend = self._get_process_group_backend()
        if dist.is_initialized():
            return
        try:
            store = self._meet()
        except OSError as error:
            self._end_children()
            if self._another_tells() and not isinstance(error, rendezvous.StartedTwiceError):
                raise SystemExit(2) from None
            raise
        world, device = (self.global_rank, self.world_size), self._bound_device()
        backend = self._process_group_backend
        dist.init_process_group(backend, None, self._timeout, world[1], world[0], store, device_id=device)
        # A thread of gloo's that still runs when the interpreter has gone ends the process with a signal.
        atexit.register(_destroy_dist_connection)

    def _another_tells(self) -> bool:
        """Whether a rank on this machine tells what all of them find, and it is not this one."""
        knows = not getattr(self.cluster_environment, "guesses", False)
        return isinstance(self._launcher, _SubprocessScriptLauncher) and self.local_rank > 0 and knows

    def _meet(self) -> dist.Store:
        environment = self.cluster_environment
        assert environment is not None
        assert self._timeout is not None
        seconds, ranks = self._timeout.total_seconds(), (self.global_rank, self.world_size)
        if self.init_method not in stores.BY_ENVIRONMENT:
            return rendezvous.meet(self.init_method, ("", 0), *ranks, seconds)
        listening = self._listening or getattr(environment, "listening", None)
        address = environment.main_address, listening.getsockname()[1] if listening else environment.main_port
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = address[0], str(address[1])
        return rendezvous.meet(None, address, *ranks, seconds, listening)

    def _bound_device(self) -> torch.device | None:
        """The only device of this rank, which spares NCCL to find it out."""
        return self.root_device if self.root_device.type != "cpu" else None

    # Parameters that are frozen or unfrozen while a fit runs

    def _ever_trained(self) -> set[nn.Parameter]:
        """The parameters that require a gradient, and those that have required one in this fit."""
        assert self.lightning_module is not None
        known = self._averaged or set()
        return {p for p in self.lightning_module.parameters() if p.requires_grad or p in known}

    def _new(self) -> set[nn.Parameter]:
        """The parameters that require a gradient which nothing averages."""
        if self._averaged is None:
            return set()
        assert self.lightning_module is not None
        return {p for p in self.lightning_module.parameters() if p.requires_grad and p not in self._averaged}

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Average the gradients of parameters that are unfrozen; a frozen one may be trained again, and stays known."""
        if self._new():
            self._average_more(batch_idx)

    def _average_more(self, batch_idx: int) -> None:
        """Have what averages gradients know all of `_ever_trained`, from this batch on."""
        raise NotImplementedError

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Check that all gradients will be averaged.

        Raises:
            ValueError: a parameter was unfrozen since the batch started.
        """
        if new := self._new():
            assert self.lightning_module is not None
            name = next(name for name, p in self.lightning_module.named_parameters() if p in new)
            expected = "expected it to be unfrozen in on_train_batch_start or earlier, as its gradient is not averaged"
            raise ValueError(f"parameter {name}: {expected}")
        super().pre_backward(closure_loss)

    def setup(self, trainer: Trainer) -> None:
        """Set the module up; nothing is known of its parameters yet."""
        self._averaged = None
        super().setup(trainer)

    # What is logged

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over the ranks; the mean of whole numbers is a float.

        Lightning rounds it down, and then divides by it: an epoch's mean over ranks with 5 rows and 4 was that over 4.
        """
        reduce_op = reduce_op.lower() if isinstance(reduce_op, str) else reduce_op
        whole = isinstance(tensor, Tensor) and not (tensor.is_floating_point() or tensor.is_complex())
        if whole and reduce_op in {"mean", "avg", dist.ReduceOp.AVG} and dist.is_initialized():
            return super().reduce(tensor.clone(), group, "sum").double() / dist.get_world_size(group)
        return super().reduce(tensor, group, reduce_op)

    # Optimizers where ranks were forked: the last fit's are made when somebody asks for them

    def make_later(self, make: Callable[[], None]) -> None:
        """Have `make` set `optimizers` and `lr_scheduler_configs` when one of them is asked for."""
        self._make = make

    def _made(self) -> None:
        if (make := self._make) is None:
            return
        self._make = None  # what it calls may ask for them, too
        try:
            make()
        except BaseException:
            self._make = make
            raise

    @property
    def optimizers(self) -> list[Optimizer]:
        """Those of the fit that runs, or of the last one."""
        self._made()
        return self._optimizers

    @optimizers.setter
    def optimizers(self, optimizers: list[Optimizer]) -> None:
        self._make = None
        DDPStrategy.optimizers.fset(self, optimizers)  # type: ignore[attr-defined]

    @property
    def lr_scheduler_configs(self) -> list[LRSchedulerConfig]:
        """Those of the fit that runs, or of the last one."""
        self._made()
        return self._lr_scheduler_configs

    @lr_scheduler_configs.setter
    def lr_scheduler_configs(self, configs: list[LRSchedulerConfig]) -> None:
        self._lr_scheduler_configs = configs

    @contextmanager
    def optimizers_aside(self, for_good: bool) -> Iterator[None]:
        """Inside there are none of an earlier fit, and afterwards if it is for good: ranks have no use for them."""
        make, self._make = self._make, None
        optimizers, configs = self.optimizers, self.lr_scheduler_configs
        self.optimizers, self.lr_scheduler_configs = [], []
        try:
            yield
        finally:
            if not for_good:
                self.optimizers, self.lr_scheduler_configs, self._make = optimizers, configs, make

    # What is each rank's own

    def process_dataloader(self, dataloader: Any) -> Any:
        """Have workers that Lightning seeds draw alike on ranks that read the same batches."""
        _auto_add_worker_init_fn(dataloader, self.distributed_sampler_kwargs["rank"])
        return super().process_dataloader(dataloader)

    def _draw_alike(self) -> None:
        """Have all ranks go on with rank zero's random numbers, where they read the same batches."""
        _set_rng_states(self.broadcast(_collect_rng_states(include_cuda=False)))

    def _share_buffers(self, rank: int = 0) -> None:
        """Have all ranks hold that one's statistics, as plain BatchNorm's."""
        assert self.lightning_module is not None
        for buffer in self.lightning_module.buffers() if dist.is_initialized() else []:
            dist.broadcast(buffer, rank)

    # Ending

    def on_exception(self, exception: BaseException) -> None:
        """Where others fell silent, name them: the error that came of it says only that a connection did.

        Raises:
            TimeoutError: a rank kept the others waiting for too long.
            ConnectionError: a rank has died.
            SystemExit: so it is, and another rank says so.
        """
        super().on_exception(exception)
        assert self._timeout is not None
        try:
            one_speaks = isinstance(self._launcher, _SubprocessScriptLauncher)
            missing_ranks.raise_for_missing(exception, self._timeout.total_seconds(), one_speaks)
        except (TimeoutError, ConnectionError, SystemExit):
            self._end_children()
            if self.lightning_module is not None:
                self.teardown()  # which Lightning would call next, had this error not come in between
            raise

    def _end_children(self) -> None:
        """End the ranks that were started as sub-processes."""
        if isinstance(self._launcher, _SubprocessScriptLauncher):
            children = self._launcher.procs.copy()
            self._launcher.procs.clear()  # Lightning's observer of them would end this process before it has spoken
            for child in children:
                child.kill()  # one that is stopped takes no other signal
                child.wait()
