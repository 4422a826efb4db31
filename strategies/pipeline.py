"""Pipeline parallelism: each rank holds some layers, and micro-batches of a batch are at different layers at a time."""

import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import LBFGS, Optimizer
from torch.utils._pytree import tree_map
from torchmetrics import Metric

from apprentice import keyed, replicas
from strategies import checkpoints, stages
from strategies.exact import SYNCHRONISE, Exact, Shard
from strategies.gradients import averaged, handed_over, set_aside
from strategies.residence import Residence
from strategies.schedules import Event, Line, MicroBatch, Plan, Step
from strategies.shards import RunningStatistics, bounds, part, rows, share
from strategies.speakers import Speaker, speaker_of
from strategies.timing import seconds

Schedule = Literal[
    "GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"
]
TOLERANCE = {torch.float16: 1e-2, torch.bfloat16: 5e-2}  # of two ways to add up one loss; else 1e-3


class PipelineStrategy(Exact):
    """Trains a LightningModule that is cut into stages, with the numbers of one device.

    The module offers `pipeline_stages()`, modules in order whose composition is its `forward`, and
    `pipeline_loss(output, batch)`, the loss of its `training_step` for some rows of a batch, a mean over these rows.
    Its hooks stay as they are: wherever they call `forward`, all ranks get what the last stage gives.

    Args:
        schedule: torch's name of the order in which micro-batches go forward and backward.
        num_microbatches: into which a batch is cut; when not given, four for each rank of a pipeline; or `exact`'s.
        data_parallel_size: pipelines side by side, which share a batch; the ranks of one follow one another.
        stages_per_rank: stages on each rank; when not given, as many as the schedule needs.
        balance: how modules are dealt to stages: by their "parameters", by the "time" they take for a micro-batch, or
            how many each stage gets.
        **kwargs: Exact's.

    Raises:
        ValueError: an option's value can't be used, alone, with these devices or with the module.
    """

    def __init__(
        self,
        schedule: Schedule = "1F1B",
        num_microbatches: int | None = None,
        data_parallel_size: int = 1,
        stages_per_rank: int | None = None,
        balance: Literal["parameters", "time"] | list[int] = "parameters",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        counts = {"num_microbatches": num_microbatches, "data_parallel_size": data_parallel_size}
        for name, value in {**counts, "stages_per_rank": stages_per_rank}.items():
            if value is not None and value < 1:
                raise ValueError(f"{name} {value}: expected at least 1")
        if schedule not in get_args(Schedule):
            raise ValueError(f"schedule {schedule}: expected {', '.join(get_args(Schedule))}")
        if isinstance(balance, str) and balance not in {"parameters", "time"}:
            raise ValueError(f"balance {balance}: expected parameters, time or a list of numbers of modules")
        if not isinstance(balance, str) and min(balance, default=0) < 1:
            raise ValueError(f"balance {balance}: expected at least one module for every stage")
        self.schedule, self.num_microbatches, self.data_parallel_size = schedule, num_microbatches, data_parallel_size
        self.stages_per_rank, self.balance = stages_per_rank, balance
        self.events: list[Event] = []
        self._plan: Plan | None = None
        self._line: Line | None = None
        self._residence: Residence | None = None
        self._interrupted = self._agreed = False
        self._calls: _Calls | None = None

    # Ranks

    @property
    def pipeline_size(self) -> int:
        """Ranks of one pipeline."""
        return self.num_processes * self.num_nodes // self.data_parallel_size

    @property
    def replica(self) -> tuple[int, int]:
        """The number of this rank's pipeline, and how many there are."""
        return self.global_rank // self.pipeline_size, self.data_parallel_size

    @property
    def _alone(self) -> bool:
        return False

    def _check_devices(self) -> None:
        devices = self.num_processes * self.num_nodes
        if devices % self.data_parallel_size:
            expected = f"expected a number that divides the {devices} devices"
            raise ValueError(f"data_parallel_size {self.data_parallel_size}: {expected}")
        super()._check_devices()
        shards = None if self.exact is None else -(-self.exact // self.data_parallel_size)
        if shards is not None and self.num_microbatches not in {None, shards}:
            expected = f"expected {shards} or none, as the shards of exact {self.exact} are the micro-batches"
            raise ValueError(f"num_microbatches {self.num_microbatches}: {expected}")
        count = shards or self.num_microbatches or 4 * self.pipeline_size
        try:
            self._plan = Plan(self.schedule, self.pipeline_size, self.stages_per_rank, count)
        except ValueError as error:
            expected = f"expected one for {count} micro-batches and {self.pipeline_size} ranks"
            raise ValueError(f"schedule {self.schedule}: {expected}: {error}") from None
        if not isinstance(self.balance, str) and len(self.balance) != self._plan.num_stages:
            raise ValueError(f"balance {self.balance}: expected {self._plan.num_stages} numbers, one for each stage")

    def setup_environment(self) -> None:
        """Join the process group, and the groups of this pipeline and of its peers in the others."""
        super().setup_environment()
        shape = self.data_parallel_size, self.pipeline_size
        mesh = init_device_mesh(self.root_device.type, shape, mesh_dim_names=("data", "pipeline"))
        self._group = mesh.get_group("pipeline")
        replicas.among(mesh.get_group("data"))

    # Setting up

    def setup(self, trainer: Trainer) -> None:
        """Cut the module and keep this rank's stages.

        Raises:
            ValueError: it can't be cut, or not so; the message names the module or the option.
        """
        module = self.lightning_module
        assert module is not None
        self.check_module(module)
        if self.exact is not None:
            self._speak_for_all(module)
        elif self.data_parallel_size == 1:
            warnings.filterwarnings("ignore", SYNCHRONISE, UserWarning)
        for metric in (m for m in module.modules() if isinstance(m, Metric)):
            metric.process_group = replicas.group()
        self._interrupted = self._agreed = False
        self.precision_plugin.clip_grad_by_norm = self._clip_by_norm  # type: ignore[method-assign]
        Strategy.setup(self, trainer)
        if any(isinstance(optimizer, LBFGS) for optimizer in self.optimizers):
            raise ValueError("strategy pipeline: expected an optimizer other than LBFGS, which needs all gradients")

    def check_module(self, module: LightningModule) -> None:
        """Raise ValueError where the module can't be cut, or not so; the message names the module or the option."""
        kind = type(module).__name__
        for name in ("pipeline_stages", "pipeline_loss"):
            if not callable(getattr(module, name, None)):
                raise ValueError(f"strategy pipeline: expected a module with {name}; {kind} has none")
        scaler = getattr(self.precision_plugin, "scaler", None)
        if not module.automatic_optimization or is_overridden("backward", module, LightningModule):
            raise ValueError(f"strategy pipeline: expected automatic optimization and Lightning's backward of {kind}")
        if scaler is not None and scaler.is_enabled():
            raise ValueError("precision 16-mixed: expected one without a loss scale, as bf16-mixed, for a pipeline")
        if self._layer_sync is not None:
            raise ValueError("sync_batchnorm True: expected False, as ranks of a pipeline have different layers")
        noisy = stages.noisy(module)
        if noisy and self.exact is not None:
            raise ValueError(
                f"exact {self.exact}: expected apprentice.keyed.Dropout in a pipeline; {noisy[0]} is torch's"
            )
        self._groups(module, "parameters" if self.balance == "time" else self.balance)

    def _setup_model(self, model: nn.Module) -> Any:
        return model

    def model_to_device(self) -> None:
        """Keep what this rank computes with, on its device, and what the others do as a form without values.

        Raises:
            ValueError: the module can't be cut, or not so.
        """
        module, plan = self.lightning_module, self._plan
        assert module is not None
        assert plan is not None
        module.forward = self._forward  # type: ignore[method-assign]
        groups = self._groups(module, self.balance)
        self._warn(module)
        self._residence = Residence(module, groups, plan.rank_of, self._group, self.root_device)
        self._line = Line(plan, groups, self._group, self.root_device)
        module.to(dtype=module.dtype)  # it learns its device from there
        module._device = self.root_device

    def _groups(self, module: LightningModule, balance: str | list[int]) -> list[list[nn.Module]]:
        """The modules of each stage."""
        assert self._plan is not None
        count, name = self._plan.num_stages, type(module).__name__
        modules: list[nn.Module] = list(module.pipeline_stages())  # type: ignore[operator]
        if len(modules) < count:
            have = f"{name}.pipeline_stages() gives {len(modules)}"
            raise ValueError(f"strategy pipeline: expected at least {count} modules, one for each stage; {have}")
        if isinstance(balance, list):
            if sum(balance) != len(modules):
                have = f"the modules that {name}.pipeline_stages() gives"
                raise ValueError(f"balance {balance}: expected numbers that add up to {len(modules)}, {have}")
            sizes = balance
        elif balance == "time" and module.trainer.training:
            sizes = stages.sizes_by_cost(self.broadcast(self._seconds(module, modules)), count)
        else:
            sizes = stages.sizes_by_cost([sum(p.numel() for p in m.parameters()) for m in modules], count)
        groups = stages.grouped(modules, sizes)
        stages.check(module, groups)
        return groups

    def _seconds(self, module: LightningModule, modules: list[nn.Module]) -> list[float]:
        """What each module takes for the first micro-batch, measured on rank zero; others wait."""
        if not self.is_global_zero:
            return []
        assert self._plan is not None
        module.to(self.root_device)
        with torch.random.fork_rng(), replicas.shard(0):
            loader: Any = module.trainer.fit_loop._data_source.dataloader()
            batch = self.precision_plugin.convert_input(next(iter(loader)))
            batch = module._on_before_batch_transfer(batch, dataloader_idx=0)
            batch = Strategy.batch_to_device(self, batch)
            stop = -(-rows(batch) // self._plan.num_microbatches)
            piece = self._asked(speaker_of(module), Shard(0, 0, stop, part(batch, 0, stop)), 0)
            with self.precision_plugin.train_step_context(), piece.context():
                return seconds(modules, piece.inputs)

    def _warn(self, module: LightningModule) -> None:
        assert self._plan is not None
        listed = stages.noisy(module)
        if listed and self.exact is not None:
            raise ValueError(
                f"exact {self.exact}: expected apprentice.keyed.Dropout in a pipeline; {listed[0]} is torch's"
            )
        if listed:
            advice = "numbers will move with the pipeline; apprentice.keyed.Dropout's do not"
            rank_zero_warn(f"{', '.join(listed)}: noise from torch's generator; {advice}")
        listed = stages.normalised(module)
        if listed and self.exact is None and self._plan.num_microbatches > 1:
            advice = "GroupNorm's numbers are those of one device"
            rank_zero_warn(f"{', '.join(listed)}: BatchNorm sees a micro-batch, not the batch; {advice}")

    # What the module calls

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        """Stands in for the module's `forward`, on all ranks at once."""
        if kwargs or not args or not all(isinstance(x, Tensor) and x.dim() for x in args):
            raise TypeError("pipeline: expected forward to be called with tensors by position, rows first")
        if self._calls is not None:
            return self._calls.forward(args)
        assert self._line is not None
        size = len(args[0])
        whole = self.exact is not None or self._plan.stages_per_rank > 1  # type: ignore[union-attr]
        cuts = bounds(size, 1 if whole else min(self._plan.num_microbatches, max(size, 1)))  # type: ignore[union-attr]
        spans = itertools.pairwise(cuts)
        step = Step([MicroBatch(b - a, tuple(x[a:b] for x in args), None, keyed.part(a, b)) for a, b in spans])
        self._line.forward(step)
        self.events = step.events
        return self._line.joined(step)[0]

    # Training

    def training_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """The loss of the batch; its backward hands over the gradients that the schedule has made on the way."""
        if self.exact is not None:
            return super().training_step(batch, *args, **kwargs)
        assert self.lightning_module is not None
        parameters = [p for names in self._parts() for p in names.values()]
        with set_aside(parameters), self._calling(partial(self._through, batch)) as calls:
            with calls.expected_once():
                output = Strategy.training_step(self, batch, *args, **kwargs)
            gradients = {p: p.grad for p in parameters}
        loss = output["loss"] if isinstance(output, Mapping) else output
        if loss is None:
            return None
        self._agree(loss)
        loss = handed_over(loss.detach(), averaged(gradients))
        return {**output, "loss": loss} if isinstance(output, Mapping) else loss

    @contextmanager
    def _calling(self, answer: Callable[[tuple[Tensor, ...]], Any]) -> Iterator["_Calls"]:
        """Inside, this is what the module's `forward` does, once."""
        self._calls = _Calls(type(self.lightning_module).__name__, answer)
        try:
            yield self._calls
        finally:
            self._calls = None

    def _through(self, batch: Any, inputs: tuple[Tensor, ...]) -> Any:
        """Send a batch through the pipeline, micro-batch by micro-batch."""
        assert self._plan is not None
        size = rows(batch)
        if any(len(x) != size for x in inputs):
            raise ValueError(f"training_step: expected forward to be called with tensors of the batch's {size} rows")
        counts = share(batch) / max(size, 1)
        spans = list(itertools.pairwise(bounds(size, self._plan.num_microbatches)))
        pieces = [
            MicroBatch(
                b - a,
                tuple(x[a:b] for x in inputs),
                partial(self._loss, Shard(number, a, b, part(batch, a, b)), (b - a) * counts),
                keyed.part(a, b),
            )
            for number, (a, b) in enumerate(spans)
        ]
        return self._train(Step(pieces))

    def _train(self, step: Step) -> Any:
        assert self._line is not None
        output = self._line.train(step)
        self.events = step.events
        if not self._agreed:
            self._expected = self._line.from_last(sum(step.losses.values(), start=torch.zeros(())).double())
        return output

    def _loss(self, shard: Shard, weight: float, output: Any) -> Tensor:
        module: Any = self.lightning_module
        with replicas.shard(shard.start):
            loss = module.pipeline_loss(output, shard.batch)
        if not isinstance(loss, Tensor) or loss.dim():
            found = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise TypeError(f"{type(module).__name__}.pipeline_loss: expected a scalar tensor, got {found}")
        return loss * weight

    def _agree(self, loss: Tensor) -> None:
        """Compare, once, what `training_step` returns with what gradients were computed of."""
        if self._agreed:
            return
        tolerance = TOLERANCE.get(loss.dtype, 1e-3)
        name = type(self.lightning_module).__name__
        if not torch.allclose(loss.detach().double(), self._expected, tolerance, tolerance, equal_nan=True):
            expected = f"expected the loss that training_step returns, {loss.item():g}"
            raise ValueError(
                f"{name}.pipeline_loss: {expected}, as the mean over micro-batches; got {self._expected:g}"
            )
        self._agreed = True

    # The exact mode: a shard is a micro-batch

    def _parts(self) -> list[dict[str, nn.Parameter]]:
        return list(self._trained().values())

    def _trained(self) -> dict[int, dict[str, nn.Parameter]]:
        """The trainable parameters of those of this rank's stages that have any."""
        assert self._line is not None
        assert self.lightning_module is not None
        names = {p: name for name, p in self.lightning_module.named_parameters() if p.requires_grad}
        found = {}
        for stage in self._line.mine:
            own = dict.fromkeys(p for m in self._line.stages[stage] for p in m.parameters() if p in names)
            found[stage] = {names[p]: p for p in own}
        return {stage: own for stage, own in found.items() if own}

    def _statistics(self, module: LightningModule) -> RunningStatistics:
        assert self._line is not None
        return RunningStatistics(*(m for stage in self._line.mine for m in self._line.stages[stage]))

    def _forward_and_backward(
        self, speaker: Speaker, statistics: RunningStatistics, batch: Any, *args: Any, **kwargs: Any
    ) -> Tensor:
        assert self._line is not None
        assert self._plan is not None
        shards = self._cut(batch)
        nothing = Shard(0, 0, 0, part(batch, 0, 0))
        pieces = [self._asked(speaker, shard, *args, **kwargs) for shard in shards or [nothing]]
        empty = MicroBatch(0, tuple(x[:0] for x in pieces[0].inputs), None, nullcontext)
        pieces += [empty] * (self._plan.num_microbatches - len(pieces))
        by_stage = {stage: RunningStatistics(*self._line.stages[stage]) for stage in self._line.mine}
        taken: dict[int, list[Tensor]] = {}
        sums = dict(zip(self._trained(), self._sums, strict=True))

        def computed(stage: int) -> None:
            if stage in sums:
                sums[stage].add()

        def went_forward(stage: int, number: int) -> None:
            taken.setdefault(number, []).extend(by_stage[stage].take())

        step = Step(pieces, computed, went_forward)
        with self.precision_plugin.train_step_context():
            output = self._train(step)
        found: dict[int, Tensor] = {}
        losses = torch.zeros((), dtype=torch.float64)
        for number, shard in enumerate(shards):
            start = shard.start - shards[0].start
            answer = tree_map(partial(_rows, start, start + shard.rows), output)
            context = self.precision_plugin.train_step_context
            with self._alone_with(shard), self._calling(partial(_known, answer)), context():
                loss = speaker.step(shard.batch, *args, **kwargs)
            losses += loss.detach().double() * shard.rows
            values = torch.stack([loss.detach().double(), *speaker.values()])
            found[shard.number] = torch.cat([values, *taken[number]])
        self._agree(losses)
        return self._table(speaker, found, statistics.size)

    def _asked(self, speaker: Speaker, shard: Shard, *args: Any, **kwargs: Any) -> MicroBatch:
        """What the module calls `forward` with for a shard; it gets no answer yet."""
        with self._alone_with(shard), self.precision_plugin.train_step_context():
            with self._calling(_stop) as calls, calls.expected_once(), suppress(_Stopped):
                speaker.step(shard.batch, *args, **kwargs)
            noise, inputs = calls.noise, calls.inputs
        if any(len(x) != shard.rows for x in inputs):
            raise ValueError(f"training_step: expected forward to be called with the batch's {shard.rows} rows")

        @contextmanager
        def alone() -> Iterator[None]:
            with replicas.shard(shard.start), noise():
                yield

        return MicroBatch(shard.rows, inputs, partial(self._loss, shard, shard.rows), alone)

    # Gradients of all stages

    def _clip_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        """Clip by the norm over all stages, added up in the order of the parameters, as on one device."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        norms = torch.zeros(2, len(parameters), dtype=torch.float64, device=self.root_device)
        for i, p in enumerate(parameters):
            if p.grad is not None:
                norms[:, i] = torch.stack([torch.linalg.vector_norm(p.grad).double(), norms.new_ones(())])
        dist.all_reduce(norms, group=self._group)
        dtype = next((p.grad.dtype for p in parameters if p.grad is not None), torch.float32)
        total = torch.linalg.vector_norm(norms[0, norms[1] > 0].to(dtype))
        nn.utils.clip_grads_with_norm_(parameters, clip_val, total)

    # What is added up over replicas; ranks of one pipeline have the same values

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce over the replicas, unless another group is given."""
        return super().reduce(tensor, replicas.group() if group is None else group, reduce_op)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Gather from the replicas, unless another group is given."""
        return super().all_gather(tensor, replicas.group() if group is None else group, sync_grads)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:  # noqa: A002 - Lightning's name
        """Whether all, or any, of the ranks decide so."""
        votes = torch.tensor(int(decision), device=self.root_device)
        dist.all_reduce(votes)
        return bool(votes == self.world_size) if all else bool(votes)

    # Checkpoints are those of one device

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The whole state, on rank zero; every rank has to ask."""
        state = super().lightning_module_state_dict()
        return state if self._residence is None else self._residence.whole(state)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load this rank's stages from the whole state."""
        state = checkpoint["state_dict"]
        mine = state if self._residence is None else self._residence.mine(state)
        super().load_model_state_dict({**checkpoint, "state_dict": mine}, strict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The whole state, on rank zero; every rank has to ask."""
        return checkpoints.gathered(super().optimizer_state(optimizer), self.is_global_zero, self._group)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the states of this rank's parameters from the whole."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            mine = {i: kept for i, kept in state["state"].items() if not parameters[i].is_meta}
            optimizer.load_state_dict({**state, "state": mine})

    # Ending

    def on_exception(self, exception: BaseException) -> None:
        """Leave the module in parts: other ranks may have gone."""
        self._interrupted = True
        super().on_exception(exception)

    def teardown(self) -> None:
        """Make the module whole again on every rank."""
        module = self.lightning_module
        assert module is not None
        if self._residence is not None:
            vars(module).pop("forward", None)
            if not self._interrupted:
                self._residence.undo()
        vars(self.precision_plugin).pop("clip_grad_by_norm", None)
        for metric in (m for m in module.modules() if isinstance(m, Metric)):
            metric.process_group = None
        replicas.among(None)
        self._residence = self._line = None
        super().teardown()


class _Calls:
    """Answers what `training_step` calls `forward` with.

    Attributes:
        inputs: what it was called with.
        noise: makes the context in which keyed noise was to be drawn.
    """

    def __init__(self, name: str, answer: Callable[[tuple[Tensor, ...]], Any]) -> None:
        self.name, self.answer, self.count = name, answer, 0
        self.inputs: tuple[Tensor, ...] = ()
        self.noise: Callable[[], Any] = nullcontext

    def forward(self, inputs: tuple[Tensor, ...]) -> Any:
        """The answer.

        Raises:
            ValueError: it is asked for again.
        """
        self.count += 1
        if self.count > 1:
            raise ValueError(f"{self.name}.training_step: expected one call of forward, got a second")
        self.inputs, self.noise = inputs, keyed.part(0, len(inputs[0]))
        return self.answer(inputs)

    @contextmanager
    def expected_once(self) -> Iterator[None]:
        """Raise ValueError where it is never asked for inside, whatever came of that."""
        reason = ""
        try:
            yield
        except (RuntimeError, NotImplementedError) as error:
            if self.count:
                raise
            reason = f": {error}"  # a layer was called itself that lives elsewhere
        if not self.count:
            raise ValueError(f"{self.name}.training_step: expected one call of forward, got none{reason}")


class _Stopped(BaseException):
    pass


def _known(answer: Any, _inputs: tuple[Tensor, ...]) -> Any:
    return answer


def _stop(_inputs: tuple[Tensor, ...]) -> Any:
    raise _Stopped


def _rows(start: int, stop: int, leaf: Any) -> Any:
    return leaf[start:stop].clone() if isinstance(leaf, Tensor) else leaf
