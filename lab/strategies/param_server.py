"""A parameter server: one rank holds the parameters and steps, the others compute gradients (Li et al. 2014)."""

import functools
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.distributed import rpc
from torch.distributed.rpc.functions import async_execution
from torch.futures import Future
from torch.optim import LBFGS, Optimizer

from apprentice import replicas
from apprentice.errors import BadInput
from apprentice.private import tree_map
from lab.strategies.rpc import CallQueue, forget_receiver, receiver, start_agent, stop_agent, wait
from strategies.base import checkpoints, failures
from strategies.base.data_parallel import DataParallel
from strategies.base.gradients import copy_from, flatten, pack, parameters_of, unpack
from strategies.base.launchers import ForkLauncher
from strategies.base.private import sync_module_states

Step = Callable[..., Any]  # an optimizer step, given its closure
GRACE = 10.0  # seconds that workers wait longer than the server, which can name the missing worker


class Push(NamedTuple):
    """A worker's packed gradients of a step."""

    rank: int
    gradients: Tensor


@async_execution
def send(push: Push) -> Future:
    """Remote call: put gradients into the server's queue; the answer is the parameters after the step with them."""
    return receiver().put(push)


class ParamServer(DataParallel):
    """The last rank holds parameters and optimizer and steps; the others send it gradients by RPC.

    A step is of the mean over the whole global batch, so the numbers are those of `ddp`. With `update` each, the
    server steps with each worker's gradient as it arrives, and that worker goes on with the parameters after its step
    (as in torch's tutorial, after Recht et al. 2011, "Hogwild!"). In a round the gradient of each worker is used once,
    in the order of arrival, which moves the numbers. All ranks have the server's parameters in evaluation and at the
    end.

    The server runs the module's hooks on empty batches; in evaluation it takes its share. A single process is both
    server and worker. Only the server has averaged gradients and optimizer state: in `on_before_optimizer_step` workers
    have no gradients, and a callback's changes of their parameters are lost. Rank zero, which logs, is a worker; its
    BatchNorm statistics count, where they are not the global batch's.

    Attributes:
        staleness: with `update` each, how many gradients were computed with parameters that lacked so many of the
            server's steps; on all ranks after training.

    Args:
        update: whether a step is of the `mean` over all workers, or of `each` one's gradient.
        **kwargs: DataParallel's.

    Raises:
        BadInput: an option's value can't be used; there is no RPC; manual optimization, a loss scale (16-mixed) or
            LBFGS, which need gradients where the loss is.
    """

    _relates_rows = False
    _has_whole_nets = False

    def __init__(self, update: Literal["mean", "each"] = "mean", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if update not in {"mean", "each"}:
            raise BadInput("update", update, "mean or each")
        self.update = update
        self.staleness: Counter[int] = Counter()
        self._queue: CallQueue | None = None  # the server's
        self._early: list[tuple[Push, Future]] = []  # pushes of the next round
        self._updates = 0  # with `update` each: the server's steps, and those that each worker's parameters have
        self._seen = Counter[int]()
        self._reply: Any = None  # a worker's: the future parameters

    @property
    def server(self) -> int:
        """The server's rank: the last, so that rank zero, which logs, sees rows."""
        return self._num_ranks - 1

    @property
    def _serves(self) -> bool:
        return self.global_rank == self.server

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Splits training over the workers and evaluation over all ranks; `batch_to_device` empties the server's."""
        trainer = self.lightning_module and self.lightning_module._trainer
        if self.server == 0 or (trainer is not None and (trainer.evaluating or trainer.predicting)):
            return {"num_replicas": self.server + 1, "rank": self.global_rank}
        return {"num_replicas": self.server, "rank": self.global_rank % self.server}

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Move a batch; the server's loses its rows in training."""
        if self.server and self._serves and self._trainer.training:
            batch = tree_map(lambda leaf: leaf[:0] if isinstance(leaf, Tensor) and leaf.dim() else leaf, batch)
        return super().batch_to_device(batch, device, dataloader_idx)

    def setup_environment(self) -> None:
        """Join the process group, with the server as a rank without rows."""
        super().setup_environment()
        replicas.set_group(None, idle=min(self.server, 1))
        if self.server:
            self._workers: Any = dist.new_group(list(range(self.server)), timeout=self._timeout)

    def _check_devices(self) -> None:
        super()._check_devices()
        if not rpc.is_available():
            expected = "a torch with torch.distributed.rpc, which this one was built without"
            raise BadInput("strategy", "param_server", expected)

    def check_module(self, module: LightningModule) -> None:
        super().check_module(module)
        if not module.automatic_optimization:
            raise BadInput("strategy", "param_server", f"automatic optimization of {type(module).__name__}")
        if self._scales_loss:
            raise BadInput("precision", "16-mixed", "one without a loss scale, as bf16-mixed, for param_server")

    def setup(self, trainer: Trainer) -> None:
        """Set the module up, and for a fit connect to the server."""
        self.check_module(self._module)
        if trainer.state.fn == TrainerFn.FITTING and self.server:
            if self._serves:
                self._queue = CallQueue(self._timeout_seconds)
            start_agent(self._queue, self._timeout_seconds)
            self.barrier()  # an agent that runs since an earlier fit does not mean that its rank is ready
        super().setup(trainer)
        if any(isinstance(optimizer, LBFGS) for optimizer in self.optimizers):
            raise BadInput("strategy", "param_server", "an optimizer other than LBFGS, which needs the loss")

    def configure_ddp(self) -> None:
        """Start with rank zero's states, without a wrapper."""
        sync_module_states(self._module)

    def on_exception(self, exception: BaseException) -> None:
        """Stop the agent at once: others may wait for a result."""
        stop_agent(graceful=False)
        super().on_exception(exception)

    def teardown(self) -> None:
        """Stop the agents of forked ranks; in other ranks they serve the next fit, too."""
        if isinstance(self._launcher, ForkLauncher):
            stop_agent()
        super().teardown()
        forget_receiver()
        replicas.set_group(None)
        self._queue = None
        self._early.clear()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Return the loss of a batch; BadInput if the module can't compute the server's, which has no rows."""
        try:
            return super().training_step(*args, **kwargs)
        except Exception as error:
            if not (self.server and self._serves) or failures.SIGNS.search(str(error)):
                raise
            expected = "a training_step that takes a batch without rows, as the server's are"
            raise BadInput("strategy", "param_server", f"{expected}: {error}") from error

    def _is_of_workers(self, group: Any) -> bool:
        """Whether a collective is over the workers: in training, unless another group is named."""
        return self.server > 0 and self._trainer.training and (group is None or group is dist.group.WORLD)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce over the ranks, in training over the workers."""
        if not self._is_of_workers(group):
            return super().reduce(tensor, group, reduce_op)
        value = tensor if self._serves else super().reduce(tensor, self._workers, reduce_op)
        value = self.broadcast(move_data_to_device(value, torch.device("cpu")))  # pickled with its device
        return move_data_to_device(value, self.root_device)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Gather from the ranks, in training from the workers; the server gets the values."""
        if not self._is_of_workers(group):
            return super().all_gather(tensor, group, sync_grads)
        if self._serves:
            values: Any = self.broadcast(None)
            return values.to(self.root_device)
        values = super().all_gather(tensor, self._workers, sync_grads)
        self.broadcast(values.detach().cpu())  # pickled with its device
        return values

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        step: Step = functools.partial(super().optimizer_step, optimizer, model=model, **kwargs)
        if not self.server:
            return step(closure)
        if not self._queue:
            # A worker's optimizer finds no gradients: its step only counts for the schedulers.
            result = step(lambda: self._push(optimizer, closure()))
            copy_from(wait(self._reply, self.server), parameters_of(optimizer))
            return result
        return (self._step_each if self.update == "each" else self._step_mean)(self._queue, optimizer, closure, step)

    def _push(self, optimizer: Optimizer, loss: Any) -> Any:
        """Send a worker's gradients to the server, and clear them."""
        parameters = parameters_of(optimizer)
        push = Push(self.global_rank, pack({p: p.grad for p in parameters}).cpu())
        self._reply = rpc.rpc_async(self.server, send, args=(push,), timeout=self._timeout_seconds + GRACE)
        for p in parameters:
            p.grad = None
        return loss

    def _step_mean(self, calls: CallQueue, optimizer: Optimizer, closure: Callable[[], Any], step: Step) -> Any:
        """Step with the mean of the workers' gradients, added in the order of the ranks."""
        parameters, pushes = parameters_of(optimizer), dict[int, tuple[Tensor, Future]]()

        def load_mean() -> Any:
            loss = closure()
            while missing := set(range(self.server)) - pushes.keys():
                push, reply = calls.get(sorted(missing))
                pushes[push.rank] = push.gradients, reply
            total = functools.reduce(torch.add, [pushes[rank][0] for rank in range(self.server)])
            load_gradients(total / self.server, parameters)
            return loss

        result = step(load_mean)
        newest = flatten(parameters).cpu()
        for _, reply in pushes.values():
            reply.set_result(newest)
        return result

    def _step_each(self, calls: CallQueue, optimizer: Optimizer, closure: Callable[[], Any], step: Step) -> Any:
        """Step once with the gradient of each worker, in the order in which they arrive."""
        loss, parameters, result = closure(), parameters_of(optimizer), None
        waiting, self._early, missing = self._early, [], set(range(self.server))
        while missing:
            push, reply = waiting.pop(0) if waiting else calls.get(sorted(missing))
            if push.rank not in missing:  # a fast worker's next gradient
                self._early.append((push, reply))
                continue
            missing.remove(push.rank)
            self.staleness[self._updates - self._seen[push.rank]] += 1

            def load(gradients: Tensor = push.gradients) -> Any:
                load_gradients(gradients, parameters)
                return loss

            result = step(load)
            self._updates += 1
            self._seen[push.rank] = self._updates
            reply.set_result(flatten(parameters).cpu())
        return result

    def _catch_up(self) -> None:
        """Load the server's parameters on all ranks; collective."""
        if self.update == "each" and self.server:
            for optimizer in self.optimizers:
                newest = flatten(parameters_of(optimizer))  # on the device, as NCCL sends no other
                dist.broadcast(newest, self.server)
                copy_from(newest, parameters_of(optimizer))
                self._seen = Counter(dict.fromkeys(range(self.server), self._updates))

    def on_validation_start(self) -> None:
        """Validate the newest parameters with rank zero's buffers."""
        self._catch_up()
        if self.server and self._trainer.state.fn == TrainerFn.FITTING:
            self._broadcast_buffers()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the newest state; collective."""
        self._catch_up()
        return super().lightning_module_state_dict()

    def on_train_end(self) -> None:
        """End with the newest parameters and the counts of late gradients, after all ranks have their last results."""
        self._catch_up()
        self.barrier()  # a rank that ends sends none
        self.staleness = self.broadcast(self.staleness, self.server)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the server's state, on rank zero; collective."""
        state: dict[str, Any] = super().optimizer_state(optimizer)
        return checkpoints.gather_states(state) if self.server else state

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)
        if not self._serves:
            for optimizer in self.optimizers:
                optimizer.state.clear()


def load_gradients(packed: Tensor, parameters: list[Any]) -> None:
    """Set the parameters' gradients to those in a packed vector."""
    for p, gradient in unpack(packed, parameters).items():
        p.grad = gradient
