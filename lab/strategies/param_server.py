"""A parameter server: one rank holds the parameters and steps, the others compute gradients (Li et al. 2014)."""

import functools
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.distributed import rpc
from torch.distributed.rpc.functions import async_execution
from torch.futures import Future
from torch.optim import Optimizer

from apprentice import replicas
from apprentice.errors import BadInput
from apprentice.private import tree_map
from lab.strategies.rpc import CallQueue, RPCStrategy, receiver, wait
from strategies.base import checkpoints, failures
from strategies.base.gradients import copy_from, flatten, pack, parameters_of, unpack

GRACE = 10.0  # seconds that workers wait longer than the server, which can name the missing worker


class Push(NamedTuple):
    """A worker's packed gradients of a step, for parameters that had `version` updates."""

    rank: int
    step: int
    version: int
    gradients: Tensor


@async_execution
def send(push: Push) -> Future:
    """Remote call: put gradients into the server's queue; the answer is the parameters after that step."""
    return receiver().put(push)


class ParamServer(RPCStrategy):
    """The last rank holds parameters and optimizer and steps; the others send it gradients by RPC.

    With `max_staleness` 0 all wait for each step, and the numbers are those of `ddp`. Otherwise a worker continues with
    parameters that lack at most so many steps (Ho et al. 2013). A step always uses the mean over the whole global
    batch, so schedules, clipping and uneven shares keep their meaning.

    With `update` each, the server steps with each worker's gradient as it arrives, and that worker goes on with the
    parameters after its step (as in torch's tutorial, after Recht et al. 2011, "Hogwild!"). In a round the gradient
    of each worker is used once, in the order of arrival, which moves the numbers. All ranks have the server's
    parameters in evaluation and at the end.

    The server runs the module's hooks on empty batches; in evaluation it takes its share. A single process is both
    server and worker. Only the server has averaged gradients and optimizer state: in `on_before_optimizer_step` workers
    have no gradients, and a callback's changes of their parameters are lost. Rank zero, which logs, is a worker; its
    BatchNorm statistics count, where they are not the global batch's.

    Attributes:
        staleness: how many of all workers' gradients were so many steps late, with `update` each so many gradients; on
            all ranks after training.

    Args:
        max_staleness: steps that a worker's parameters may lack.
        update: whether a step is of the `mean` over all workers, or of `each` one's gradient.
        **kwargs: DataParallel's.

    Raises:
        BadInput: an option's value can't be used; there is no RPC; manual optimization, a loss scale (16-mixed) or
            LBFGS, which need gradients where the loss is.
    """

    rpc_name = "param_server"

    def __init__(self, max_staleness: int = 0, update: Literal["mean", "each"] = "mean", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if update not in {"mean", "each"}:
            raise BadInput("update", update, "mean or each")
        if max_staleness < 0:
            raise BadInput("max_staleness", max_staleness, "0 (wait for every step) or more")
        self.max_staleness, self.update = max_staleness, update
        self.staleness: Counter[int] = Counter()
        self._queue: CallQueue | None = None  # the server's
        self._pushes: dict[int, dict[int, tuple[Push, Future]]] = defaultdict(dict)  # of steps, by rank
        self._steps = self._version = 0  # steps of this fit; those that this rank's parameters have
        self._updates = 0  # with `update` each: all, and those that a worker's parameters have
        self._seen = Counter[int]()
        self._pending: deque[tuple[int, Any]] = deque()  # steps and future parameters

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

    def setup(self, trainer: Trainer) -> None:
        """Set the module up, and for a fit connect to the server."""
        self.check_module(self._module)
        if trainer.state.fn == TrainerFn.FITTING and self.server:
            if self._serves:
                self._queue = CallQueue(self._timeout_seconds)
            self._start_agent(self._queue)
        super().setup(trainer)
        self._check_optimizers()

    def teardown(self) -> None:
        super().teardown()
        replicas.set_group(None)
        self._queue = None
        self._pushes.clear()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Return the loss of a batch; BadInput if the module can't compute the server's, which has no rows."""
        try:
            return super().training_step(*args, **kwargs)
        except Exception as error:
            if not (self.server and self._serves) or failures.SIGNS.search(str(error)):
                raise
            expected = "a training_step that takes a batch without rows, as the server's are"
            raise BadInput("strategy", self.rpc_name, f"{expected}: {error}") from error

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
        if not self.server:
            return super().optimizer_step(optimizer, closure, model, **kwargs)

        if self._queue and self.update == "each":
            step = partial(super().optimizer_step, optimizer, model=model, **kwargs)
            return self._step_each(optimizer, closure, step)

        def exchange() -> Any:
            loss = closure()
            self._collect(optimizer) if self._queue else self._push(optimizer)
            return loss

        # A worker's optimizer finds no gradients: its step only counts for the schedulers.
        result = super().optimizer_step(optimizer, exchange, model, **kwargs)
        self._steps += 1
        if self._queue:
            parameters = flatten(parameters_of(optimizer)).cpu()
            for _, reply in self._pushes.pop(self._steps - 1).values():
                reply.set_result(parameters)
        else:
            self._receive(optimizer, self.max_staleness)
        return result

    def _step_each(self, optimizer: Optimizer, closure: Callable[[], Any], step: Callable[..., Any]) -> Any:
        """Step once with the gradient of each worker, in the order in which they arrive."""
        assert self._queue is not None
        loss, parameters, result = closure(), parameters_of(optimizer), None
        arrived, left = self._pushes.pop(self._steps, {}), set(range(self.server))
        while left:
            while not arrived:
                push, reply = self._queue.get(sorted(left))
                (arrived if push.step == self._steps else self._pushes[push.step])[push.rank] = push, reply
            push, reply = arrived.pop(next(iter(arrived)))
            left.remove(push.rank)
            self.staleness[self._updates - self._seen[push.rank]] += 1

            def load_gradients(gradients: Tensor = push.gradients) -> Any:
                for p, gradient in unpack(gradients, parameters).items():
                    p.grad = gradient
                return loss

            result = step(load_gradients)
            self._updates += 1
            self._seen[push.rank] = self._updates
            reply.set_result(flatten(parameters).cpu())
        self._steps += 1
        return result

    def _push(self, optimizer: Optimizer) -> None:
        parameters = parameters_of(optimizer)
        gradients = pack({p: p.grad for p in parameters}).cpu()
        push = Push(self.global_rank, self._steps, self._version, gradients)
        reply = rpc.rpc_async(self.server, send, args=(push,), timeout=self._timeout_seconds + GRACE)
        self._pending.append((self._steps + 1, reply))
        for p in parameters:
            p.grad = None

    def _collect(self, optimizer: Optimizer) -> None:
        """Average the workers' gradients, added in the order of the ranks."""
        assert self._queue is not None
        arrived = self._pushes[self._steps]
        while missing := set(range(self.server)) - arrived.keys():
            push, reply = self._queue.get(sorted(missing))
            self._pushes[push.step][push.rank] = push, reply  # a fast worker's next step comes early
        pushes = [arrived[rank][0] for rank in range(self.server)]
        for push in pushes:
            lacking = push.step - push.version
            assert 0 <= lacking <= self.max_staleness, f"rank {push.rank} lacked {lacking} steps"
            self.staleness[lacking] += 1
        mean = functools.reduce(torch.add, [push.gradients for push in pushes]) / self.server
        for p, gradient in unpack(mean, parameters_of(optimizer)).items():
            p.grad = gradient

    def _receive(self, optimizer: Optimizer, lacking: int = 0) -> None:
        """Load the newest parameters that have arrived; wait while they lack more steps than that."""
        newest = None
        while self._pending and (len(self._pending) > lacking or self._pending[0][1].done()):
            self._version, reply = self._pending.popleft()
            newest = wait(reply, self.server)
        if newest is not None:
            copy_from(newest, parameters_of(optimizer))

    def _catch_up(self) -> None:
        """Load the parameters after the last step on all ranks."""
        for optimizer in self.optimizers:
            self._receive(optimizer)
            if self.update == "each" and self.server:
                newest = flatten(parameters_of(optimizer))  # on the device, as NCCL sends no other
                dist.broadcast(newest, self.server)
                copy_from(newest, parameters_of(optimizer))
                self._seen = Counter(dict.fromkeys(range(self.server), self._updates))

    def on_validation_start(self) -> None:
        """Validate the newest parameters with rank zero's buffers."""
        super().on_validation_start()
        if self.server and self._trainer.state.fn == TrainerFn.FITTING:
            self._broadcast_buffers()

    def on_train_end(self) -> None:
        """End with the newest parameters, and the counts of late gradients."""
        super().on_train_end()
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
