"""A master that runs forward on workers by RPC, with distributed autograd and torch's DistributedOptimizer."""

import itertools
from collections.abc import Callable
from contextlib import ExitStack
from operator import methodcaller
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.distributed import autograd, rpc
from torch.optim import Optimizer

from apprentice import keyed, replicas
from apprentice.contract import HasStages
from apprentice.errors import BadInput
from apprentice.private import tree_map, tree_map_only
from apprentice.weights import FEW, list_keys
from lab.strategies.rpc import (
    LocalOptimizer,
    RPCStrategy,
    Worker,
    load_distributed_optimizer,
    peer_errors,
    receiver,
    wait,
)
from strategies.base import stages
from strategies.base.gradients import NO_GRADIENT, pack, parameters_of, unpack
from strategies.base.model_parallel import PLAIN, devices_of
from strategies.base.shared_replica import SharedReplica
from strategies.exact.shards import bounds
from strategies.pipeline.states import RankRandomState


class RPCHybrid(RPCStrategy, SharedReplica):
    """Rank zero splits each batch over the other ranks, which hold a replica each, by torch.distributed.rpc.

    The module's `forward` is remote: when a hook calls it, with tensors whose first dimension is the batch's rows, each
    worker computes some rows, and the master gets one output. From the loss of `training_step`, distributed autograd
    computes the workers' gradients, their sum is every rank's gradient, and DistributedOptimizer steps all ranks. So
    any module that trains by its `forward` works, with the numbers of one device. The loss has to depend on all outputs
    of `forward` that require a gradient; otherwise workers wait for one until the time-out.

    All ranks run the module's hooks on the whole batch and the same output, so logs, metrics, schedulers and callbacks
    agree; only the master writes predictions. The master computes no `forward`, and holds a replica for checkpoints; a
    single process does everything itself. Two workers need three devices. BatchNorm sees a worker's rows, unless it
    computes over replicas.

    Args:
        devices_per_worker: the devices of a worker, over which the module's `pipeline_stages()` are split; a list, as
            [1, 2], has a number for each worker: here the first computes the whole module.
        **kwargs: DataParallel's.

    Raises:
        BadInput: an option's value can't be used, alone or with the module; there is no RPC; manual optimization, a
            backward that the module overrides, a loss scale (16-mixed) or LBFGS.
    """

    rpc_name = "rpc_hybrid"

    def __init__(self, devices_per_worker: int | list[int] = 1, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if min([devices_per_worker] if isinstance(devices_per_worker, int) else devices_per_worker, default=0) < 1:
            raise BadInput("devices_per_worker", devices_per_worker, "at least 1")
        self.devices_per_worker = devices_per_worker
        self._stages: list[tuple[torch.device, list[nn.Module]]] = []  # a worker's, if it has several devices
        self._workers: list[Any] = []  # the master's remote references
        self._forwards = 0  # in the current step
        self._autograd = ExitStack()  # the master's context of distributed autograd, which serves one backward
        self._context = 0  # its number
        self._distributed: Any = None  # the master's DistributedOptimizer

    @property
    def num_workers(self) -> int:
        """Ranks that compute for the master."""
        return self._num_ranks - 1

    @property
    def _counts(self) -> list[int]:
        """Devices of each rank."""
        if isinstance(self.devices_per_worker, int):
            return [self.devices_per_worker] * self._num_ranks
        if len(self.devices_per_worker) != self.num_workers:
            expected = f"a number for each of the {self.num_workers} workers; the master has none"
            raise BadInput("devices_per_worker", self.devices_per_worker, expected)
        return [1, *self.devices_per_worker]

    def setup_environment(self) -> None:
        """Join the process group, the workers' group, and a group of this rank alone."""
        super().setup_environment()
        if self.num_workers:
            self._worker_group: Any = dist.new_group(list(range(1, self.num_workers + 1)))
            self._local_group, _ = dist.new_subgroups(1)
            self.undo.callback(replicas.set_group, None)
            replicas.set_group(self._local_group)

    def check_module(self, module: LightningModule) -> None:
        super().check_module(module)
        if is_overridden("backward", module, LightningModule):
            raise BadInput("strategy", self.rpc_name, f"Lightning's backward of {type(module).__name__}")
        if (count := max(self._counts)) > 1:
            self._cut(module, count)

    def _cut(self, module: LightningModule, count: int) -> list[list[nn.Module]]:
        """Cut the module into stages with about as many parameters each; BadInput where that can't be."""
        name = type(module).__name__
        if not isinstance(module, HasStages):
            raise BadInput("devices_per_worker", count, f"a module with pipeline_stages; {name} has none")
        modules = list(module.pipeline_stages())
        if len(modules) < count:
            raise BadInput("devices_per_worker", count, f"at most the {len(modules)} stages of {name}")
        groups = stages.group_modules(modules, stages.sizes_by_parameters(modules, range(count)))
        stages.check(module, groups)
        return groups

    def setup(self, trainer: Trainer) -> None:
        """Set the module up, and connect to the workers."""
        module = self._module
        self.check_module(module)
        if not self.num_workers:
            super().setup(trainer)
            return
        self._read_whole_batches(trainer)
        self._noise = RankRandomState(self.global_rank)
        self._reduce_metrics(self._local_group)
        if plain := [name for name in stages.batch_norms(module) if type(module.get_submodule(name)) in PLAIN]:
            rank_zero_warn(f"{list_keys(plain, FEW)}: BatchNorm sees the rows of one worker, not the batch")
        super().setup(trainer)
        optimizers = self.optimizers if trainer.state.fn == TrainerFn.FITTING else []
        self._check_optimizers()
        load_distributed_optimizer()  # in this thread: a worker's calls arrive in others
        self._worker = Worker(self._timeout_seconds, next(iter(optimizers), None))
        self._start_agent(self._worker)
        if self.is_global_zero:
            self._workers = [rpc.remote(rank, receiver) for rank in range(1, self._num_ranks)]

    def model_to_device(self) -> None:
        """Move the module, or a worker's stages, to their devices; `forward` is remote from now on."""
        super().model_to_device()
        module = self._module
        if self.num_workers:
            count = self._counts[self.global_rank]
            if count > 1 and not self.is_global_zero:
                assert self.parallel_devices is not None
                gpus, first = torch.cuda.device_count(), self.global_rank - self.local_rank
                counts = self._counts[first : first + len(self.parallel_devices)]
                devices = devices_of(self.local_rank, counts, self.parallel_devices, gpus)
                self._stages = list(zip(devices, self._cut(module, count), strict=True))
                for device, group in self._stages:
                    for part in group:
                        part.to(device)
            self.replace(module, "forward", self._forward)
            self.replace(module, "backward", self._backward)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        """Replaces the module's `forward`, on all ranks at once."""
        if kwargs or not args or not all(isinstance(x, Tensor) and x.dim() and len(x) == len(args[0]) for x in args):
            raise TypeError("rpc_hybrid: expected forward to be called with tensors by position, rows first")
        self._forwards += 1
        spans = list(itertools.pairwise(bounds(len(args[0]), self.num_workers)))
        if self.is_global_zero:
            output = self._forward_on_workers([tuple(x[a:b] for x in args) for a, b in spans])
            self.broadcast(tree_map_only(Tensor, lambda x: x.detach().cpu(), output))  # pickled with its device
            return output
        noise = keyed.slice_rows(*spans[self.global_rank - 1])

        def compute(*inputs: Tensor) -> Any:
            x: Any = tuple(x.to(self.root_device) for x in inputs)
            replicas.set_group(self._worker_group)
            try:
                with noise(), self._noise():
                    if not self._stages:
                        return type(self._module).forward(self._module, *x)
                    for device, group in self._stages:
                        x = stages.apply_modules(group, tree_map_only(Tensor, methodcaller("to", device), x))
                    return x
            finally:
                replicas.set_group(self._local_group)

        self._worker.serve("forward", compute)
        return tree_map_only(Tensor, lambda x: x.to(self.root_device), self.broadcast(None))

    def _forward_on_workers(self, pieces: list[tuple[Tensor, ...]]) -> Any:
        """Compute these pieces on the workers, and join their outputs."""
        pairs = zip(self._workers, pieces, strict=True)
        calls = [Worker.call(worker, Worker.forward, *(x.cpu() for x in piece)) for worker, piece in pairs]
        outputs = []
        for rank, future in enumerate(calls, 1):
            output, error = wait(future, rank)
            if error:
                raise RuntimeError(f"rank {rank}: {error}")
            outputs.append(tree_map_only(Tensor, lambda x: x.to(self.root_device), output))
        return tree_map(lambda *xs: torch.cat(xs) if isinstance(xs[0], Tensor) else xs[0], *outputs)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Return the loss of the batch, on the master with the workers' autograd graphs; `forward` has to be called."""
        if not self.num_workers:
            return super().training_step(*args, **kwargs)
        if self.is_global_zero:
            self._autograd.close()
            self._context = self._autograd.enter_context(autograd.context())
        self._forwards = 0
        try:
            output = super().training_step(*args, **kwargs)
        except RuntimeError as error:
            if not NO_GRADIENT.search(str(error)):
                raise
            expected = "no gradient of forward's output before backward, as the workers have computed it"
            raise BadInput("strategy", self.rpc_name, expected) from error
        if not self._forwards:
            raise BadInput("", f"{type(self._module).__name__}.training_step", "a call of forward")
        return output

    def _backward(self, loss: Tensor, *_: Any, **__: Any) -> None:
        """Replaces the module's `backward`: each rank computes its part of the gradient."""
        if self.is_global_zero:
            with peer_errors("a worker"):
                autograd.backward(self._context, [loss])
        for p, gradient in autograd.get_gradients(self.broadcast(self._context)).items():
            p.grad = gradient if p.grad is None else p.grad + gradient

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        if not self.num_workers:
            return super().optimizer_step(optimizer, closure, model, **kwargs)

        def sum_gradients() -> Any:
            loss = closure()
            parameters = parameters_of(optimizer)
            total = pack({p: p.grad for p in parameters}).to(self.root_device)
            dist.all_reduce(total)
            for p, gradient in unpack(total, parameters).items():
                p.grad = gradient
            return loss

        loss = self.precision_plugin._wrap_closure(self._module, optimizer, sum_gradients)
        # Hooks and clipping have changed them; DistributedOptimizer replaces them by autograd's.
        gradients = [(p, p.grad) for p in parameters_of(optimizer)]
        self.barrier()

        def step() -> None:
            for p, gradient in gradients:
                p.grad = gradient
            optimizer.step(**kwargs)

        if self.is_global_zero:
            with peer_errors("a worker"):
                if self._distributed is None:
                    calls = [Worker.call(worker, Worker.parameters) for worker in self._workers]
                    parameters = [p for rank, future in enumerate(calls, 1) for p in wait(future, rank)]
                    self._distributed = load_distributed_optimizer()(LocalOptimizer, parameters)
                self._distributed.step(self._context)
            step()  # the master's: DistributedOptimizer waits in this thread for the workers
        else:
            self._worker.serve("step", step)
        return loss

    def _catch_up(self) -> None:
        """Set all buffers to the first worker's: the master's see no batch."""
        if self.num_workers and self._trainer.state.fn == TrainerFn.FITTING:
            self._broadcast_buffers(1)

    def teardown(self) -> None:
        """Stop the agents after all ranks have finished."""
        self._autograd.close()
        self._workers, self._stages, self._distributed = [], [], None
        super().teardown()
