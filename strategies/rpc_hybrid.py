"""A master that drives workers by RPC: their forward, distributed autograd, and torch's DistributedOptimizer."""

import itertools
import logging
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.overrides.distributed import _sync_module_states
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.distributed import rpc
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from apprentice import keyed, replicas
from strategies.base import stages
from strategies.base.agreeing import SharedReplica
from strategies.base.gradients import packed, unpacked
from strategies.base.model_parallel import PLAIN, devices_of
from strategies.exact.shards import bounds
from strategies.pipeline.states import RankRandomState
from strategies.rpc import agents, replica
from strategies.rpc.base import RPCStrategy, trained
from strategies.rpc.main_thread import MainThreadQueue


class RPCHybrid(RPCStrategy, SharedReplica):
    """Rank zero cuts each batch for the others, which hold a replica each; torch.distributed.rpc takes it there.

    What is remote is the module's `forward`: wherever its hooks call it, with tensors that have the batch's rows first,
    the workers compute some rows each, and the master gets one output. Of the loss that `training_step` makes of it,
    distributed autograd finds the workers' gradients, their sum is the gradient of the whole batch on every rank, and
    DistributedOptimizer has all step. So any module goes that trains by its `forward`, with the numbers of one device;
    the loss has to depend on all that `forward` gives with a gradient, or workers wait for one until the time-out.

    All ranks run the module's hooks, on the whole batch and the same output, so logs, metrics, schedulers and callbacks
    agree; predictions are handed to writers by the master alone. The master computes no `forward` and holds a replica
    for checkpoints; one process does it all itself. For two workers take three devices. BatchNorm sees the rows of a
    worker, unless it computes over replicas.

    Args:
        devices_per_worker: a worker's replica is cut, by the module's `pipeline_stages()`, over so many devices.
        **kwargs: DataParallel's.

    Raises:
        ValueError: an option's value can't be used, alone or with the module; there is no RPC; manual optimization, a
            backward of the module's own, a loss scale (16-mixed) or LBFGS.
    """

    rpc_name = "rpc_hybrid"

    def __init__(self, devices_per_worker: int = 1, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if devices_per_worker < 1:
            raise ValueError(f"devices_per_worker {devices_per_worker}: expected at least 1")
        self.devices_per_worker = devices_per_worker
        self._replica: replica.Replica | None = None
        self._workers: list[Any] = []  # the master's remote references
        self._forwards = 0  # in the step that is being computed
        self._context: tuple[AbstractContextManager, int] | None = None
        self._steps: Any = None  # the master's DistributedOptimizer

    # Ranks

    @property
    def num_workers(self) -> int:
        """Ranks that compute for the master."""
        return self.num_processes * self.num_nodes - 1

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """One replica: every rank's loader yields whole batches."""
        return {"num_replicas": 1, "rank": 0}

    def setup_environment(self) -> None:
        """Join the process group, the workers' group, and one that a rank has to itself."""
        super().setup_environment()
        if self.num_workers:
            self._between: Any = dist.new_group(list(range(1, self.num_workers + 1)))
            self._own, _ = dist.new_subgroups(1)
            replicas.set_group(self._own)

    # Setting up

    def check_module(self, module: LightningModule) -> None:
        """Raise ValueError where the module can't be trained so."""
        super().check_module(module)
        if is_overridden("backward", module, LightningModule):
            raise ValueError(f"strategy rpc_hybrid: expected Lightning's backward of {type(module).__name__}")
        if self.devices_per_worker > 1:
            replica.cut(module, self.devices_per_worker)

    def setup(self, trainer: Trainer) -> None:
        """Set the module up, and the way to the workers."""
        module = self.lightning_module
        assert module is not None
        self.check_module(module)
        if not self.num_workers:
            super().setup(trainer)
            return
        self._read_whole(trainer)
        self._noise = RankRandomState(keyed.fold_in(torch.initial_seed(), self.global_rank))
        self._share_metrics(self._own)
        if plain := [name for name in stages.normalised(module) if type(module.get_submodule(name)) in PLAIN]:
            rank_zero_warn(f"{', '.join(plain)}: BatchNorm sees the rows of one worker, not the batch")
        super().setup(trainer)
        optimizers = self.optimizers if trainer.state.fn == TrainerFn.FITTING else []
        self._check_optimizers()
        _distributed_optimizer()  # here, as a worker's calls come in other threads
        if not self.is_global_zero:
            self._desk = MainThreadQueue(0, self._seconds)
            replica.employ(replica.Worker(self._desk, next(iter(optimizers), None)))
        self._start_agents()
        if self.is_global_zero:
            names = [agents.name(rank) for rank in range(1, self.num_workers + 1)]
            self._workers = [rpc.remote(name, replica.employed) for name in names]

    def configure_ddp(self) -> None:
        """Begin with rank zero's states; nothing is wrapped."""
        assert self.lightning_module is not None
        _sync_module_states(self.lightning_module)

    def model_to_device(self) -> None:
        """Move the module to this rank's device, a worker's stages each to its own; `forward` is remote from now on."""
        super().model_to_device()
        module = self.lightning_module
        assert module is not None
        assert self.parallel_devices is not None
        devices = None
        if self.devices_per_worker > 1 and not self.is_global_zero:
            gpus = torch.cuda.device_count()
            devices = devices_of(self.local_rank, self.devices_per_worker, self.parallel_devices, gpus)
        if self.num_workers:
            self._replica = replica.Replica(module, devices)
            module.forward = self._forward  # type: ignore[method-assign]
            module.backward = self._backward  # type: ignore[method-assign]

    # Forward

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        """Stands in for the module's `forward`, on all ranks at once."""
        if kwargs or not args or not all(isinstance(x, Tensor) and x.dim() and len(x) == len(args[0]) for x in args):
            raise TypeError("rpc_hybrid: expected forward to be called with tensors by position, rows first")
        self._forwards += 1
        spans = list(itertools.pairwise(bounds(len(args[0]), self.num_workers)))
        if self.is_global_zero:
            output = self._driven([tuple(x[a:b] for x in args) for a, b in spans])
            self.broadcast(tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, output))
            return output
        noise = keyed.part(*spans[self.global_rank - 1])

        def compute(*inputs: Tensor) -> Any:
            assert self._replica is not None
            replicas.set_group(self._between)
            try:
                with noise(), self._noise():
                    return self._replica(*(x.to(self.root_device) for x in inputs))
            finally:
                replicas.set_group(self._own)

        self._desk.attend("forward", compute)
        return self.broadcast(None)

    def _driven(self, pieces: list[tuple[Tensor, ...]]) -> Any:
        """What the workers make of these pieces, as one output."""
        pairs = zip(self._workers, pieces, strict=True)
        calls = [replica.call(replica.Worker.forward, worker, *(x.cpu() for x in piece)) for worker, piece in pairs]
        outputs = []
        for rank, call in enumerate(calls, 1):
            output, fault = agents.answered(call, rank)
            if fault:
                raise RuntimeError(f"rank {rank}: {fault}")
            outputs.append(output)
        return tree_map(self._joined, outputs[0], *outputs[1:])

    def _joined(self, *leaves: Any) -> Any:
        return torch.cat([leaf.to(self.root_device) for leaf in leaves]) if isinstance(leaves[0], Tensor) else leaves[0]

    # Training

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """The loss of the batch, on the master with the workers' history.

        Raises:
            ValueError: the module has not called its `forward`.
        """
        if not self.num_workers:
            return super().training_step(*args, **kwargs)
        if self.is_global_zero:
            self._forget()
            context: Any = torch.distributed.autograd.context()
            self._context = context, context.__enter__()
        self._forwards = 0
        output = super().training_step(*args, **kwargs)
        if not self._forwards:
            raise ValueError(f"{type(self.lightning_module).__name__}.training_step: expected a call of forward")
        return output

    def _forget(self) -> None:
        """Leave the context of distributed autograd: it has one backward, in which all that was sent takes part."""
        if self._context is not None:
            self._context[0].__exit__(None, None, None)
            self._context = None

    def _backward(self, loss: Tensor, *_: Any, **__: Any) -> None:
        """Stands in for the module's `backward`: each rank finds its part of the gradient."""
        number = 0
        if self._context is not None:
            number = self._context[1]
            with agents.lost("a worker"):
                torch.distributed.autograd.backward(number, [loss])
        for p, gradient in torch.distributed.autograd.get_gradients(self.broadcast(number)).items():
            p.grad = gradient if p.grad is None else p.grad + gradient

    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:  # fmt: skip
        """Give all ranks the gradient of the batch, and have all step."""
        if not self.num_workers:
            return super().optimizer_step(optimizer, closure, model, **kwargs)

        def summed() -> Any:
            loss = closure()
            self._sum(optimizer)
            return loss

        loss = self.precision_plugin._wrap_closure(self.lightning_module, optimizer, summed)  # type: ignore[arg-type]
        gradients = [(p, p.grad) for p in trained(optimizer)]
        self.barrier()  # hooks and clipping have changed them; DistributedOptimizer will set what autograd has found

        def step() -> None:
            for p, gradient in gradients:
                p.grad = gradient
            optimizer.step(**kwargs)

        if self._context is None:
            self._desk.attend("step", step)
        else:
            with agents.lost("a worker"):
                self._distributed().step(self._context[1])
            step()
        return loss

    def _sum(self, optimizer: Optimizer) -> None:
        """Add up the parts of all ranks."""
        parameters = trained(optimizer)
        total = packed({p: p.grad for p in parameters}).to(self.root_device)
        dist.all_reduce(total)
        for p, gradient in unpacked(total, parameters).items():
            p.grad = gradient

    def _distributed(self) -> Any:
        """The workers' optimizers as one; the master's own is not among them, as its thread waits for theirs."""
        if self._steps is None:
            calls = [replica.call(replica.Worker.parameters, worker) for worker in self._workers]
            parameters = [p for rank, call in enumerate(calls, 1) for p in agents.answered(call, rank)]
            make = _distributed_optimizer()
            log = logging.getLogger(make.__module__)
            log.addFilter(_no_news)
            self._steps = make(replica.LocalStep, parameters)
            log.removeFilter(_no_news)
        return self._steps

    # What others see

    def _take_buffers(self) -> None:
        """Have all buffers be the first worker's: the master's see no batch."""
        assert self.lightning_module is not None
        if self.num_workers and self.lightning_module.trainer.state.fn == TrainerFn.FITTING:
            self._share_buffers(1)

    def on_validation_start(self) -> None:
        """Validate with the first worker's buffers."""
        self._take_buffers()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The module's state; every rank has to ask."""
        self._take_buffers()
        return super().lightning_module_state_dict()

    def on_train_end(self) -> None:
        """End with the workers' buffers."""
        self._take_buffers()
        super().on_train_end()

    def teardown(self) -> None:
        """Hang up, when all are done, and give the module its own methods back."""
        self._forget()
        self._workers, self._steps = [], None
        replica.employ(None)
        replicas.set_group(None)
        if self._replica is not None:
            self._replica = None
            for name in ("forward", "backward"):
                vars(self.lightning_module).pop(name, None)
            self._share_metrics(None)
        super().teardown()


def _distributed_optimizer() -> Any:
    """Torch's class: loaded late, as that takes a while, and without what older versions say of their own insides."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch.distributed.optim import DistributedOptimizer
    return DistributedOptimizer


def _no_news(record: logging.LogRecord) -> bool:
    """Whether a record says more than that an optimizer is not one of torch's functional ones."""
    return not record.msg.startswith("Creating the optimizer")
