"""The base of all strategies of this package: how ranks start, meet and end; how they compute, its steps say."""

import atexit
import multiprocessing
import os
from collections.abc import Collection
from datetime import timedelta
from typing import Any, Literal
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from apprentice.contract import layout_of
from apprentice.errors import BadInput
from strategies.base import failures, gradients, rendezvous
from strategies.base.launchers import ForkLauncher, ScriptLauncher
from strategies.base.private import (
    add_worker_init_fn,
    callbacks_of,
    collect_rng_states,
    destroy_process_group,
    set_rng_states,
)
from strategies.base.ranks import RankStrategy
from strategies.base.steps import PlainSteps

LONGEST = 1e9  # seconds of a timeout, of which torch counts nanoseconds in 64 bits


def check_backend(name: str) -> None:
    """Raise BadInput unless torch has a process group's backend, or one a device, as cpu:gloo,cuda:nccl."""
    names = [part.rpartition(":")[2].lower() for part in name.split(",")]
    known = dist.Backend.backend_list[1:]  # the first is "undefined"
    if not {*names} <= {*known}:
        raise BadInput("process_group_backend", name, f"one of {', '.join(known)}")


class DataParallel(RankStrategy):
    """Lightning's DDPStrategy with ranks that are forked where that is safe, and errors that name the missing rank.

    A forked rank starts in a second; a sub-process imports everything again (8 ranks: 10 s against 80 s). After the
    ranks have ended, the Trainer that forked them has their state and continues their logs: see `fit_state`.

    Args:
        start_method: "fork", "spawn", "popen" (sub-processes), or "auto": fork on CPU, sub-processes otherwise. Where a
            launcher has started the ranks already (torchrun, SLURM, MPI), none is started.
        timeout: seconds a rank may keep the others waiting, at the start too, or a timedelta; None: half an hour.
        process_group_backend: gloo, nccl or another of torch's; None: the one that fits the devices.
        init_method: where ranks meet: tcp://HOST:PORT, an address of rank 0's; file:///PATH, a file that all can write;
            env:// or None: where MASTER_ADDR and MASTER_PORT or the launcher say, else at a free port.
        accelerator: as DDPStrategy's, and so are the others; the Trainer sets those that are None.
    """

    _relates_rows = True  # whether a loss may relate rows of the global batch, which it always may under `exact`
    _has_whole_nets = True  # whether a rank can call the nets of a module by themselves
    _has_trainer = False
    _interrupted = False  # whether an exception has ended the fit, and other ranks may have gone
    steps: PlainSteps  # how batches are run

    def __init__(
        self,
        start_method: Literal["auto", "fork", "spawn", "popen"] = "auto",
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
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else 1800.0 if timeout is None else timeout
        if not 0 < seconds <= LONGEST:
            raise BadInput("timeout", timeout, f"seconds, above 0, at most {LONGEST:g}")
        limit = timedelta(seconds=seconds)
        if process_group_backend is not None:
            check_backend(process_group_backend)
        if init_method is not None:
            rendezvous.check_init_method(init_method)
        from_trainer = accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin
        options: dict[str, Any] = {"timeout": limit, "process_group_backend": process_group_backend}
        super().__init__(*from_trainer, init_method=init_method, **options)
        self.start_method = start_method
        self.steps = PlainSteps()

    def _refuse(self, arguments: Collection[str], *names: str) -> None:
        """Raise TypeError for any of `arguments`, or only for these names, which the class sets itself."""
        for name in names or arguments:
            if name in arguments:
                raise TypeError(f"{type(self).__name__}(...) got an unexpected argument {name!r}")

    @property
    def _module(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    @property
    def _trainer(self) -> Trainer:
        return self._module.trainer

    @property
    def _scales_loss(self) -> bool:
        scaler = getattr(self.precision_plugin, "scaler", None)
        return scaler is not None and scaler.is_enabled()

    @property
    def _num_ranks(self) -> int:
        """The world size, known before the ranks are started."""
        return self.num_processes * self.num_nodes

    @property
    def exact(self) -> int | None:
        """The number of shards of a batch, if it is cut; set it before the Trainer is made."""
        return self.steps.shards

    @exact.setter
    def exact(self, shards: int | None) -> None:
        if self._has_trainer:
            raise BadInput("exact", shards, "a number that is set before the Trainer is made")
        self.steps = self._make_steps(shards)

    def _make_steps(self, shards: int | None) -> PlainSteps:
        """Return the way to run batches, cut into so many shards unless that is None."""
        if shards is not None:
            raise AttributeError(f"{type(self).__name__} has no exact mode")
        return PlainSteps()

    def _fault(self, expected: str, step: str = "training_step") -> BadInput:
        """Return the error of a step that can't be trained so; it names `exact`, where a batch is cut."""
        return BadInput("exact", self.exact, expected) if self.exact else BadInput("", step, expected)

    @property
    def replica(self) -> tuple[int, int]:
        """The number of this rank's replica of the module, and the number of replicas."""
        return self.global_rank, self._num_ranks

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """The number of ranks that read different rows, and the number of this one."""
        rank, replicas = self.replica if self.steps.has_own_rows else (0, 1)
        return {"num_replicas": replicas, "rank": rank}

    # How ranks start and meet

    def _configure_launcher(self) -> None:
        self._check_devices()
        self._has_trainer = True
        if not self.steps.needs_group():
            self._launcher = None
            return
        method: Any = self.start_method
        if method == "auto":
            method = "fork" if self.root_device.type == "cpu" else "popen"
            forks = "fork" in multiprocessing.get_all_start_methods()
            if method == "fork" and (torch.cuda.is_initialized() or not forks):
                why = "CUDA is in use in this process" if forks else "this platform has no fork"
                rank_zero_info(f"{why}: ranks are started as sub-processes, each of which imports everything again")
                method = "popen"
        if method == "popen" or self.cluster_environment.creates_processes_externally:
            self._launcher = ScriptLauncher(self)
        else:
            self._start_method = method
            self._launcher = ForkLauncher(self, start_method=method)

    def _check_devices(self) -> None:
        """Raise BadInput, before ranks are started, where an option does not fit these devices."""
        if self._process_group_backend == "nccl" and self.root_device.type != "cuda":
            raise BadInput("process_group_backend", "nccl", "gloo, as there are no GPUs in use")
        environment = self.cluster_environment
        if environment.creates_processes_externally and (started := environment.world_size()) != self._num_ranks:
            devices = f"{started / self.num_nodes:g} on each of {self.num_nodes} nodes"
            raise BadInput("devices", self.num_processes, f"{devices}, as {started} ranks were started")
        self.steps.check_devices()

    def check_module(self, module: LightningModule) -> None:
        """Raise BadInput where the strategy can't train the module; called before a fork and in each rank."""
        layout, name = layout_of(module), type(self).__name__
        if layout.relates_rows and not self._relates_rows and self.exact is None:
            expected = "objectives that don't relate rows of the global batch, or another, as ddp or fsdp"
            raise BadInput("strategy", name, expected)
        if layout.whole_nets_unless and not self._has_whole_nets:
            expected = f"{layout.whole_nets_unless}, or ddp or ddp_zero1, whose ranks have whole nets"
            raise BadInput("strategy", name, expected)
        self.steps.check_module(module)

    def _refuse_callbacks(self, trainer: Trainer, kinds: tuple[type[Callback], ...], expected: str) -> None:
        for callback in callbacks_of(trainer):
            if isinstance(callback, kinds):
                raise BadInput("callbacks", type(callback).__name__, expected)

    def join(self) -> None:
        """Join the process group early, where a launcher has started the ranks."""
        if self.cluster_environment.creates_processes_externally:
            assert self.accelerator is not None
            self.accelerator.setup_device(self.root_device)
            self.setup_distributed()

    def _kill_children(self) -> None:
        if isinstance(self._launcher, ScriptLauncher):
            self._launcher.kill_children()

    def setup_distributed(self) -> None:
        """Join the process group, unless this process has or needs none: see `rendezvous`."""
        reset_seed()
        self.set_world_ranks()
        if not self.steps.needs_group():
            return
        self._process_group_backend = self._get_process_group_backend()
        if dist.is_initialized():
            return
        try:
            store = self._rendezvous()
        except OSError as error:
            self._kill_children()
            # Local rank 0 reports an error that all ranks find, where each rank knows which one it is.
            knows = not getattr(self.cluster_environment, "guesses", False)
            reported = isinstance(self._launcher, ScriptLauncher) and self.local_rank > 0 and knows
            if reported and not isinstance(error, rendezvous.StartedTwiceError):
                raise SystemExit(2) from None
            raise
        rank, size, device = self.global_rank, self.world_size, self._bound_device()
        dist.init_process_group(self._process_group_backend, None, self._timeout, size, rank, store, device_id=device)
        # A gloo thread that outlives the interpreter ends the process with a signal.
        atexit.register(destroy_process_group)

    def _rendezvous(self) -> dist.Store:
        environment = self.cluster_environment
        ranks, seconds = (self.global_rank, self.world_size), self._timeout_seconds
        if self.num_nodes > 1 and self._process_group_backend != "nccl":
            rendezvous.check_interface(urlsplit(self.init_method or "").hostname or environment.main_address)
        if self.init_method not in rendezvous.BY_ENVIRONMENT:
            return rendezvous.rendezvous(self.init_method, ("", 0), *ranks, seconds)
        bound = self._socket or getattr(environment, "listening", None)
        address = environment.main_address, bound.getsockname()[1] if bound else rendezvous.main_port(environment)
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = address[0], str(address[1])
        return rendezvous.rendezvous(None, address, *ranks, seconds, bound)

    def _bound_device(self) -> torch.device | None:
        """Return the only device of this rank, which NCCL need not find out then."""
        return self.root_device if self.root_device.type != "cpu" else None

    # What ranks send

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over the ranks; the mean of integers is a float, which Lightning rounds down."""
        reduce_op = reduce_op.lower() if isinstance(reduce_op, str) else reduce_op
        whole = isinstance(tensor, Tensor) and not (tensor.is_floating_point() or tensor.is_complex())
        if whole and reduce_op in {"mean", "avg", dist.ReduceOp.AVG} and dist.is_initialized():
            return super().reduce(tensor.clone(), group, "sum").double() / dist.get_world_size(group)
        return super().reduce(tensor, group, reduce_op)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """(ranks, *shape): the tensors of all ranks of a group, by default of all; with `sync_grads` differentiable."""
        if not dist.is_initialized():
            return tensor
        with torch.set_grad_enabled(sync_grads and torch.is_grad_enabled()):
            return gradients.gather(tensor, group)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:  # noqa: A002 - Lightning's name
        """Whether all, or any, of the ranks decide so, whatever `reduce` is over."""
        votes = super().reduce(torch.tensor(int(decision), device=self.root_device), None, "sum")
        return bool(votes == self.world_size) if all else bool(votes)

    def process_dataloader(self, dataloader: Any) -> Any:
        """Seed data workers by the sampler's rank, so that ranks which read the same batches draw the same."""
        add_worker_init_fn(dataloader, self.distributed_sampler_kwargs["rank"])
        return super().process_dataloader(dataloader)

    def _broadcast_random_states(self) -> None:
        """Set all ranks' random generators to rank zero's states, where ranks read the same batches."""
        set_rng_states(self.broadcast(collect_rng_states(include_cuda=False)))

    def _broadcast_buffers(self, rank: int = 0) -> None:
        """Set all ranks' buffers, such as a plain BatchNorm's statistics, to one rank's."""
        if dist.is_initialized():
            for buffer in self._module.buffers():
                dist.broadcast(buffer, rank)

    # How a fit begins and ends

    def setup_environment(self) -> None:
        super().setup_environment()
        self.steps.setup_environment()

    def setup(self, trainer: Trainer) -> None:
        self._interrupted = False
        self.check_module(self._module)
        self.steps.setup(trainer)
        if self.steps.needs_group():
            super().setup(trainer)
        else:
            Strategy.setup(self, trainer)

    def on_exception(self, exception: BaseException) -> None:
        """Name the ranks that stopped responding, if a collective has failed: see `failures`."""
        self._interrupted = True
        super().on_exception(exception)
        missing, self.missing = self.missing, None
        try:
            if missing is not None:
                raise missing
            failures.raise_for_missing(self, exception)
        except (TimeoutError, ConnectionError, ValueError, SystemExit):
            self._kill_children()
            if self.lightning_module is not None:  # Lightning's next calls, had this error not come in between
                if (trainer := self.lightning_module._trainer) is not None:
                    for logger in trainer.loggers:
                        logger.finalize("failed")
                self.teardown()
            raise

    # How batches are run

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        return self.steps.batch_to_device(super().batch_to_device, batch, device, dataloader_idx)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return self.steps.training_step(super().training_step, *args, **kwargs)

    def on_validation_start(self) -> None:
        """Begin to count batches."""
        self.steps.start_evaluation()

    on_test_start = on_predict_start = on_validation_start

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self.steps.evaluation_step(super().validation_step, *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self.steps.evaluation_step(super().test_step, *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self.steps.predict_step(super().predict_step, *args, **kwargs)
