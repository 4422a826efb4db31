"""A parameter server: one rank holds the parameters and steps, the others compute gradients (Li et al. 2014)."""

from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.overrides.distributed import _sync_module_states
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed import rpc
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from apprentice import replicas
from strategies.base import checkpoints
from strategies.base.gradients import packed, unpacked
from strategies.rpc import agents, inbox
from strategies.rpc.base import RPCStrategy, trained

GRACE = 10.0  # seconds that workers wait longer than the server: it knows whom it waits for


class ParamServer(RPCStrategy):
    """The last rank holds parameters and optimizer and steps; the others send it gradients by RPC.

    With `max_staleness` 0 nobody goes on before the step is done, and the numbers are those of `ddp`. Else a worker
    goes on with the parameters it has, as long as they lack no more than so many steps (Ho et al. 2013); a step is
    still by the mean over the whole global batch, so that schedules, clipping and uneven shares mean what they did.

    The server's batches are empty, and it runs the module's hooks on them; in evaluation it takes its share. One
    process is both. Averaged gradients and the optimizer's state are the server's alone: workers have no gradients in
    `on_before_optimizer_step`, and what a callback changes of parameters there is lost. What rank zero logs and shows
    is a worker's. BatchNorm's statistics, where they are not the global batch's, are rank zero's.

    Attributes:
        staleness: of the gradients of all workers, how many were so many steps late; on all ranks once
            training has ended.

    Args:
        max_staleness: steps that the parameters of a worker may lack.
        **kwargs: DataParallel's.

    Raises:
        ValueError: an option's value can't be used; there is no RPC; manual optimization, a loss scale (16-mixed) or
            LBFGS, which need gradients where the loss is.
    """

    rpc_name = "param_server"

    def __init__(self, max_staleness: int = 0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if max_staleness < 0:
            raise ValueError(f"max_staleness {max_staleness}: expected 0 (wait for every step) or more")
        self.max_staleness = max_staleness
        self.staleness: Counter[int] = Counter()
        self._inbox: inbox.Inbox | None = None
        self._steps = self._version = 0  # behind this rank in this fit; those that its parameters have
        self._pending: deque[tuple[int, Any]] = deque()  # steps whose parameters are on their way

    # Ranks

    @property
    def server(self) -> int:
        """The server's rank: the last, so that rank zero, which logs, sees rows."""
        return self.num_processes * self.num_nodes - 1

    @property
    def _serves(self) -> bool:
        return self.global_rank == self.server

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Workers share what is trained on, all ranks what is evaluated; the server's share is cut to nothing later."""
        trainer = self.lightning_module and self.lightning_module._trainer
        if self.server == 0 or (trainer is not None and (trainer.evaluating or trainer.predicting)):
            return {"num_replicas": self.server + 1, "rank": self.global_rank}
        return {"num_replicas": self.server, "rank": self.global_rank % self.server}

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Move a batch; the server's has no rows in training."""
        assert self.lightning_module is not None
        if self.server and self._serves and self.lightning_module.trainer.training:
            batch = tree_map(lambda leaf: leaf[:0] if isinstance(leaf, Tensor) and leaf.dim() else leaf, batch)
        return super().batch_to_device(batch, device, dataloader_idx)

    # Starting and ending

    def setup_environment(self) -> None:
        """Join the process group; the server is in it, but gets no rows."""
        super().setup_environment()
        replicas.set_group(None, idle=min(self.server, 1))
        if self.server:
            self._workers: Any = dist.new_group(list(range(self.server)), timeout=self._timeout)

    def setup(self, trainer: Trainer) -> None:
        """Set the module up, and for a fit the way to the server."""
        assert self.lightning_module is not None
        self.check_module(self.lightning_module)
        if trainer.state.fn == TrainerFn.FITTING and self.server:
            if self._serves:
                self._inbox = inbox.Inbox(self.server, self._seconds)
            inbox.opened(self._inbox)  # before anyone can call
            self._start_agents()
        super().setup(trainer)
        self._check_optimizers()

    def configure_ddp(self) -> None:
        """Begin with rank zero's states; nothing is wrapped."""
        assert self.lightning_module is not None
        _sync_module_states(self.lightning_module)

    def teardown(self) -> None:
        """Close the inbox, when all are done."""
        super().teardown()
        inbox.opened(None)
        replicas.set_group(None)
        self._inbox = None

    # Training

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """The loss of a batch.

        Raises:
            ValueError: the module can't compute one of the server's, which have no rows.
        """
        try:
            return super().training_step(*args, **kwargs)
        except Exception as error:
            if not (self.server and self._serves):
                raise
            expected = "expected a training_step that takes a batch without rows, as the server's are"
            raise ValueError(f"strategy param_server: {expected}: {error}") from error

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce over the ranks; in training over those that have rows."""
        assert self.lightning_module is not None
        named = not (group is None or group is dist.group.WORLD)
        if named or not self.server or not self.lightning_module.trainer.training:
            return super().reduce(tensor, group, reduce_op)
        value = tensor if self._serves else super().reduce(tensor, self._workers, reduce_op)
        value = self.broadcast(move_data_to_device(value, torch.device("cpu")))  # pickled, with rank zero's device
        return move_data_to_device(value, self.root_device)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:  # noqa: A002 - Lightning's name
        """Whether all ranks, or any, decide so, the server among them."""
        votes = torch.tensor(int(decision), device=self.root_device)
        votes = super().reduce(votes, None, "sum")
        return bool(votes == self.world_size) if all else bool(votes)

    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:  # fmt: skip
        """Bring gradients to the server, step there, and bring parameters back."""
        if not self.server:
            return super().optimizer_step(optimizer, closure, model, **kwargs)

        def exchanged() -> Any:
            loss = closure()
            self._collect(optimizer) if self._inbox else self._send(optimizer)
            return loss

        # A worker's optimizer finds no gradient, so it does nothing but count for the schedulers.
        result = super().optimizer_step(optimizer, exchanged, model, **kwargs)
        self._steps += 1
        if self._inbox:
            self._inbox.answer(self._steps - 1, torch.cat([p.detach().flatten().cpu() for p in trained(optimizer)]))
        else:
            self._receive(optimizer, self.max_staleness)
        return result

    def _send(self, optimizer: Optimizer) -> None:
        parameters = trained(optimizer)
        push = inbox.Push(self.global_rank, self._steps, self._version, packed({p: p.grad for p in parameters}).cpu())
        to, patience = agents.name(self.server), self._seconds + GRACE
        self._pending.append((self._steps + 1, rpc.rpc_async(to, inbox.put, args=(push,), timeout=patience)))
        for p in parameters:
            p.grad = None

    def _collect(self, optimizer: Optimizer) -> None:
        """Take the mean of the workers' gradients, added in their order."""
        assert self._inbox is not None
        pushes = self._inbox.take(self._steps)
        for push in pushes:
            lacking = push.step - push.version
            assert 0 <= lacking <= self.max_staleness, f"rank {push.rank} lacked {lacking} steps"
            self.staleness[lacking] += 1
        total = pushes[0].gradients
        for push in pushes[1:]:
            total = total + push.gradients
        for p, mean in unpacked(total, trained(optimizer), len(pushes)).items():
            p.grad = mean

    @torch.no_grad()
    def _receive(self, optimizer: Optimizer, lacking: int = 0) -> None:
        """Take the newest parameters that have come; wait while they would lack more than so many steps."""
        newest = None
        while self._pending and (len(self._pending) > lacking or self._pending[0][1].done()):
            self._version, reply = self._pending.popleft()
            newest = agents.answered(reply, self.server)
        if newest is not None:
            parameters = trained(optimizer)
            for p, values in zip(parameters, newest.split([p.numel() for p in parameters]), strict=True):
                p.copy_(values.view_as(p))

    def _catch_up(self) -> None:
        """Have all ranks hold the same: the parameters after every step that was made."""
        for optimizer in self.optimizers:
            self._receive(optimizer)

    # What others see

    def on_validation_start(self) -> None:
        """Validate the newest parameters, with rank zero's buffers."""
        self._catch_up()
        assert self.lightning_module is not None
        if self.server and self.lightning_module.trainer.state.fn == TrainerFn.FITTING:
            self._share_buffers()

    def on_train_end(self) -> None:
        """End with the newest parameters; tell how late gradients were."""
        self._catch_up()
        self.staleness = self.broadcast(self.staleness, self.server)
        super().on_train_end()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The module's state after every step that was made."""
        self._catch_up()
        return super().lightning_module_state_dict()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The server's state, on rank zero; every rank has to ask."""
        state: dict[str, Any] = super().optimizer_state(optimizer)
        return checkpoints.gathered(state, self.is_global_zero) if self.server else state

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the state; workers keep none of it."""
        super().load_optimizer_state_dict(checkpoint)
        if not self._serves:
            for optimizer in self.optimizers:
                optimizer.state.clear()
