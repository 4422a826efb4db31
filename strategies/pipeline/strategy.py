"""Pipeline parallelism: each rank holds some layers, and several micro-batches are in the pipeline at a time."""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, cast, get_args

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import LBFGS, Optimizer

from apprentice import keyed, replicas
from apprentice.errors import BadInput
from strategies.base import checkpoints, stages
from strategies.base.gradients import NORM, parameters_of
from strategies.base.shared_replica import SharedReplica
from strategies.base.steps import PlainSteps
from strategies.exact.shard_logging import shard_logger_of
from strategies.exact.shards import Shard, part, rows
from strategies.pipeline.cutting import StageAssignment, cut, seconds, warn_of_other_numbers
from strategies.pipeline.forward import StagedForward
from strategies.pipeline.placement import StagePlacement
from strategies.pipeline.runner import Event, PipelineRunner
from strategies.pipeline.steps import ExactPipelineSteps, PipelinedShards, PipelineSteps

Schedule = Literal[
    "GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"
]


class PipelineStrategy(SharedReplica):
    """Trains a LightningModule that is cut into stages, with the numbers of one device.

    The module offers `pipeline_stages()`, modules in order whose composition is its `forward`, and
    `pipeline_loss(output, batch)`, the loss of its `training_step` for some rows of a batch, a mean over these rows.
    Its hooks need no change: wherever they call `forward`, all ranks get the last stage's output.

    Parameters, optimizer states and gradients are on their stage's rank; clipping, logs, metrics and checkpoints are
    those of one device.

    Args:
        schedule: torch's name of the order in which micro-batches go forward and backward.
        num_microbatches: of a batch; None: four for each rank of a pipeline, or `exact`'s shards.
        data_parallel_size: number of pipelines that share a batch; the ranks of one follow one another.
        stages_per_rank: stages on each rank; None: as many as the schedule needs.
        balance: how modules are distributed over stages: by their "parameters", by the "time" they take for a
            micro-batch, or by a list of numbers of modules, one for each stage.
        exact: number of shards of a batch, for the bits of one device, as ExactSteps says; None for no such promise.
        **kwargs: DataParallel's.

    Raises:
        BadInput: an option's value can't be used, alone, with these devices or with the module.
    """

    _relates_rows = False
    steps: PipelineSteps | ExactPipelineSteps
    assignment: StageAssignment
    forward: StagedForward  # takes the place of the module's

    def __init__(
        self,
        schedule: Schedule = "1F1B",
        num_microbatches: int | None = None,
        data_parallel_size: int = 1,
        stages_per_rank: int | None = None,
        balance: Literal["parameters", "time"] | list[int] = "parameters",
        *,
        exact: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if schedule not in get_args(Schedule):
            raise BadInput("schedule", schedule, f"{', '.join(get_args(Schedule))}")
        counts = {"data_parallel_size": data_parallel_size, "stages_per_rank": stages_per_rank}
        for name, value in {**counts, "num_microbatches": num_microbatches}.items():
            if value is not None and value < 1:
                raise BadInput(name, value, "at least 1")
        if isinstance(balance, str) and balance not in {"parameters", "time"}:
            raise BadInput("balance", balance, "parameters, time or a list of numbers of modules")
        if not isinstance(balance, str) and min(balance, default=0) < 1:
            raise BadInput("balance", balance, "at least one module for every stage")
        self.schedule, self.num_microbatches, self.balance = schedule, num_microbatches, balance
        self.data_parallel_size, self.stages_per_rank = data_parallel_size, stages_per_rank
        self.exact = exact
        self._placement: StagePlacement | None = None
        self._group: Any = None  # the ranks of this pipeline

    def _make_steps(self, shards: int | None) -> PlainSteps:
        sizes = self.num_microbatches, self.data_parallel_size
        return PipelineSteps(self, *sizes) if shards is None else ExactPipelineSteps(self, shards, *sizes)

    @property
    def events(self) -> list[Event]:
        """When this rank computed the last batch's micro-batches."""
        return self.forward.events if hasattr(self, "forward") else []

    @property
    def replica_size(self) -> int:
        return self._num_ranks // self.data_parallel_size

    def _check_devices(self) -> None:
        if self._num_ranks % self.data_parallel_size:
            expected = f"a number that divides the {self._num_ranks} devices"
            raise BadInput("data_parallel_size", self.data_parallel_size, expected)
        super()._check_devices()
        count, ranks = self.steps.count_microbatches(), self.replica_size
        try:
            self.assignment = StageAssignment(self.schedule, ranks, self.stages_per_rank, count)
        except ValueError as error:
            expected = f"one for {count} micro-batches and {ranks} ranks"
            raise BadInput("schedule", self.schedule, f"{expected}: {error}") from None
        if not isinstance(self.balance, str) and len(self.balance) != self.assignment.num_stages:
            raise BadInput("balance", self.balance, f"{self.assignment.num_stages} numbers, one for each stage")

    def setup_environment(self) -> None:
        """Join the process group, and the groups of this pipeline and of this rank's peers in other pipelines."""
        super().setup_environment()
        shape = self.data_parallel_size, self.replica_size
        mesh = init_device_mesh(self.root_device.type, shape, mesh_dim_names=("data", "pipeline"))
        self._group = mesh.get_group("pipeline")
        self.undo.callback(replicas.set_group, None)
        replicas.set_group(mesh.get_group("data"))

    # Setting up

    def setup(self, trainer: Trainer) -> None:
        self.check_trainer(trainer)
        self.check_module(self._module)
        self.steps.setup(trainer)
        self._reduce_metrics(replicas.group())
        self.replace(self.precision_plugin, "clip_grad_by_norm", self._clip_by_norm)
        self._interrupted = False
        Strategy.setup(self, trainer)
        if any(isinstance(optimizer, LBFGS) for optimizer in self.optimizers):
            raise BadInput("strategy", "pipeline", "an optimizer other than LBFGS, which needs all gradients")

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Make the optimizers, without initial states of other ranks' parameters."""
        super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            for p in [p for p in optimizer.state if p.is_meta]:
                del optimizer.state[p]

    def check_module(self, module: LightningModule) -> None:
        """Raise BadInput if the module can't be cut, or not so; the message names the module or the option."""
        groups = self._cut(module)
        if self._scales_loss:
            raise BadInput("precision", "16-mixed", "one without a loss scale, as bf16-mixed, for a pipeline")
        if self._layer_sync is not None:
            raise BadInput("sync_batchnorm", "True", "False, as ranks of a pipeline have different layers")
        super().check_module(module)
        if self.exact is not None and (noisy := keyed.find_unkeyed_layers(module)):
            raise self._fault(f"apprentice.keyed.Dropout in a pipeline; {noisy[0]} is torch's")
        stages.check_composition(module, groups)

    def check_trainer(self, trainer: Trainer) -> None:
        """Raise BadInput for a setting that needs the whole module; the message names it."""
        if trainer._detect_anomaly:
            raise BadInput("detect_anomaly", "True", "False, as it takes the bits of packed tensors for NaN")
        self._refuse_averaging(trainer)
        self._refuse_callbacks(trainer, (BaseFinetuning,), "none that unfreezes layers, which no rank has all of")

    def _setup_model(self, model: nn.Module) -> Any:
        return model

    def model_to_device(self) -> None:
        """Keep this rank's stages on its device, and meta tensors for the others."""
        module = self._module
        in_one_piece = self.exact is not None  # in evaluation, for the bits of one device
        self.forward = self.steps.forward = StagedForward(module, self.global_rank, in_one_piece)
        self.replace(module, "forward", self.forward)
        groups = self._cut(module)
        if self.balance == "time" and module.trainer.training:
            costs = self._seconds(module, [*itertools.chain(*groups)])
            groups = self._cut(module, stages.sizes_by_cost(costs, self.assignment.rank_of))
        self.stage_sizes = [len(group) for group in groups]
        warn_of_other_numbers(module, not in_one_piece and self.assignment.num_microbatches > 1)
        self.forward.runner = PipelineRunner(self.assignment, groups, self._group, self.root_device)
        self._placement = StagePlacement(module, self.forward.runner)
        module._device = self.root_device

    def _cut(self, module: LightningModule, sizes: list[int] | None = None) -> list[list[nn.Module]]:
        return cut(module, self.assignment.rank_of, sizes if isinstance(self.balance, str) else self.balance)

    def _seconds(self, module: LightningModule, layers: Sequence[nn.Module]) -> list[float]:
        """Measure each layer's seconds for the first micro-batch, on rank zero."""
        with torch.random.fork_rng():
            loaders = CombinedLoader(module.trainer.fit_loop._data_source.dataloader(), "max_size_cycle")
            batch, *_ = next(iter(loaders))  # on all ranks, as reading may need them
        times: list[float] = []
        if self.is_global_zero:
            module.to(self.root_device)
            with torch.random.fork_rng(), replicas.shard(0):
                batch = module._on_before_batch_transfer(self.precision_plugin.convert_input(batch), dataloader_idx=0)
                batch = Strategy.batch_to_device(self, batch)
                stop = -(-rows(batch) // self.assignment.num_microbatches)
                number = [0] if is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2) else []
                shard = Shard(0, 0, stop, part(batch, 0, stop))
                training = PipelinedShards(self, 1)
                training.forward = self.forward
                piece = training.microbatch(shard_logger_of(module), shard, *number)
                with self.precision_plugin.train_step_context(), piece.context():
                    times = seconds(layers, piece.inputs, piece.request)
        return self.broadcast(times)

    # Gradients of all stages

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Step this rank's stages; hooks find meta tensors for other ranks' gradients, which have no norm."""
        others = [p for p in parameters_of(optimizer) if p.is_meta and p.requires_grad]

        def add_stand_ins() -> Any:
            loss = closure()
            for p in others:
                p.grad = torch.empty_like(p)
            return loss

        try:
            loss = self.precision_plugin._wrap_closure(self._module, optimizer, add_stand_ins)
        except RuntimeError as error:
            if "meta tensor" not in str(error):
                raise
            expected = f"{NORM}, as each rank has the gradients of its stages"
            raise BadInput("", f"strategy pipeline: {self.forward.name}", expected) from error
        for p in others:
            p.grad = None
        optimizer.step(**kwargs)
        return loss

    def gradient_norm(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        """Return the norm over all stages, () float64, with the bits of one device; collective."""
        return cast("Tensor", torch.linalg.vector_norm(self._norms(list(parameters), torch.float64)))

    def _norms(self, parameters: Sequence[nn.Parameter], dtype: torch.dtype | None = None) -> Tensor:
        """Norms of the gradients of all stages in the order of the parameters, float64, computed in `dtype`."""
        norms = torch.zeros(2, len(parameters), dtype=torch.float64, device=self.root_device)
        for i, p in enumerate(parameters):
            if p.grad is not None and not p.is_meta:
                norms[:, i] = torch.stack([torch.linalg.vector_norm(p.grad, dtype=dtype).double(), norms.new_ones(())])
        dist.all_reduce(norms, group=self._group)
        return norms[0, norms[1] > 0]

    def _clip_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        """Clip by the norm over all stages, as torch computes it on one device."""
        parameters = parameters_of(optimizer)
        dtype = next((p.grad.dtype for p in parameters if p.grad is not None), torch.float32)
        total = torch.linalg.vector_norm(self._norms(parameters).to(dtype))
        nn.utils.clip_grads_with_norm_(parameters, clip_val, total)

    # Checkpoints are those of one device

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the whole state, on rank zero; collective."""
        state = super().lightning_module_state_dict()
        return state if self._placement is None else self._placement.full_state(state)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load this rank's stages from the whole state."""
        state = checkpoint["state_dict"]
        local = state if self._placement is None else self._placement.local_state(state)
        super().load_model_state_dict({**checkpoint, "state_dict": local}, strict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the whole state, on rank zero; collective."""
        state = checkpoints.gather_states(super().optimizer_state(optimizer), self._group)
        return state if self.is_global_zero else {}

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the states of this rank's parameters from the whole state."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            parameters = parameters_of(optimizer)
            local = {i: values for i, values in state["state"].items() if not parameters[i].is_meta}
            optimizer.load_state_dict({**state, "state": local})

    def teardown(self) -> None:
        """Make the module whole again on every rank, or leave it in parts, where other ranks may have gone."""
        placement, self._placement = self._placement, None
        try:
            if placement is not None:
                placement.restore(gather=not self._interrupted)
        finally:
            super().teardown()
