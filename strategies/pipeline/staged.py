"""A module cut into stages, each of which lives on one rank."""

from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import LBFGS, Optimizer

from apprentice import keyed, replicas
from strategies.base import checkpoints, stages
from strategies.base.shared_replica import SharedReplica
from strategies.exact import Exact
from strategies.pipeline.placement import StagePlacement
from strategies.pipeline.schedules import Place, Plan


class Staged(SharedReplica, Exact):
    """Ranks in rows, each of which holds the module once, in stages.

    Parameters, optimizer states and gradients are where their stage is; clipping, what is logged, metrics and
    checkpoints are as on one device. What `forward` does, and training, is left to the strategy.

    Args:
        data_parallel_size: rows side by side, which share a batch; the ranks of one follow one another.
        stages_per_rank: stages on each rank; when not given, as many as the schedule needs.
        balance: how modules are dealt to stages: by their "parameters", by the "time" they take for a micro-batch, or
            how many each stage gets.
        **kwargs: Exact's.

    Raises:
        ValueError: an option's value can't be used, alone, with these devices or with the module.
    """

    def __init__(
        self,
        data_parallel_size: int = 1,
        stages_per_rank: int | None = None,
        balance: Literal["parameters", "time"] | list[int] = "parameters",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        for name, value in {"data_parallel_size": data_parallel_size, "stages_per_rank": stages_per_rank}.items():
            if value is not None and value < 1:
                raise ValueError(f"{name} {value}: expected at least 1")
        if isinstance(balance, str) and balance not in {"parameters", "time"}:
            raise ValueError(f"balance {balance}: expected parameters, time or a list of numbers of modules")
        if not isinstance(balance, str) and min(balance, default=0) < 1:
            raise ValueError(f"balance {balance}: expected at least one module for every stage")
        self.data_parallel_size, self.stages_per_rank, self.balance = data_parallel_size, stages_per_rank, balance
        self.plan: Plan
        self._residence: StagePlacement | None = None
        self._group: Any = None  # the ranks of this pipeline, where this is one
        self._interrupted = False

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

    @property
    def _returns_predictions(self) -> bool:
        return self.global_rank % self.pipeline_size == 0

    def _check_devices(self) -> None:
        devices = self.num_processes * self.num_nodes
        if devices % self.data_parallel_size:
            expected = f"expected a number that divides the {devices} devices"
            raise ValueError(f"data_parallel_size {self.data_parallel_size}: {expected}")
        super()._check_devices()
        self.plan = self._planned()
        if not isinstance(self.balance, str) and len(self.balance) != self.plan.num_stages:
            raise ValueError(f"balance {self.balance}: expected {self.plan.num_stages} numbers, one for each stage")

    def _planned(self) -> Plan:
        """Which rank has which stages."""
        raise NotImplementedError

    def setup_environment(self) -> None:
        """Join the process group, and the groups of this pipeline and of its peers in the others."""
        super().setup_environment()
        shape = self.data_parallel_size, self.pipeline_size
        mesh = init_device_mesh(self.root_device.type, shape, mesh_dim_names=("data", "pipeline"))
        self._group = mesh.get_group("pipeline")
        replicas.set_group(mesh.get_group("data"))

    # Setting up

    def setup(self, trainer: Trainer) -> None:
        """Cut the module and keep this rank's stages.

        Raises:
            ValueError: it can't be cut, or not so; the message names the module or the option.
        """
        module = self.lightning_module
        assert module is not None
        self.check_trainer(trainer)
        self.check_module(module)
        if self.exact is not None:
            self._share_evaluation(trainer)
            self._broadcast_random_states()
        elif self.data_parallel_size == 1:
            self._read_whole_batches(trainer)
        self._set_metrics_group(replicas.group())
        self._interrupted = False
        self.precision_plugin.clip_grad_by_norm = self._clip_by_norm  # type: ignore[method-assign]
        Strategy.setup(self, trainer)
        if any(isinstance(optimizer, LBFGS) for optimizer in self.optimizers):
            raise ValueError("strategy pipeline: expected an optimizer other than LBFGS, which needs all gradients")

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Make them; what some of them keep from the start is kept of this rank's parameters."""
        super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            for p in [p for p in optimizer.state if p.is_meta]:
                del optimizer.state[p]

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
        if self.exact is not None and (noisy := keyed.unkeyed(module)):
            expected = "expected apprentice.keyed.Dropout in a pipeline"
            raise ValueError(f"exact {self.exact}: {expected}; {noisy[0]} is torch's")
        stages.check_composition(module, self._groups(module, "parameters" if self.balance == "time" else self.balance))

    def check_trainer(self, trainer: Trainer) -> None:
        """Raise ValueError where a setting can't be kept on ranks with parts of a module; the message names it."""
        if trainer._detect_anomaly:
            raise ValueError("detect_anomaly True: expected False, as bits travel, some of which look like NaN")
        averaging = StochasticWeightAveraging, WeightAveraging
        self._refuse_callbacks(trainer, averaging, "none that averages weights, which no rank has all of")
        self._refuse_callbacks(trainer, (BaseFinetuning,), "none that unfreezes layers, which no rank has all of")

    def _setup_model(self, model: nn.Module) -> Any:
        return model

    def model_to_device(self) -> None:
        """Keep what this rank computes with, on its device, and what the others do as a form without values.

        Raises:
            ValueError: the module can't be cut, or not so.
        """
        module = self.lightning_module
        assert module is not None
        module.forward = self._forward  # type: ignore[method-assign]
        groups = self._groups(module, self.balance)
        self._warn(module)
        self._residence = StagePlacement(module, groups, self.plan.rank_of, self._group, self.root_device)
        self._settled(Place(self.plan, groups, self._group, self.root_device))
        module._device = self.root_device

    def _groups(self, module: LightningModule, balance: str | list[int]) -> list[list[nn.Module]]:
        """The modules of each stage."""
        count, name = self.plan.num_stages, type(module).__name__
        modules: list[nn.Module] = list(module.pipeline_stages())  # type: ignore[operator]
        if strange := [type(part).__name__ for part in modules if not isinstance(part, nn.Module)]:
            raise ValueError(f"strategy pipeline: expected modules from {name}.pipeline_stages(), got a {strange[0]}")
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

    def _warn(self, module: LightningModule) -> None:
        if listed := keyed.unkeyed(module):
            advice = "numbers will move with the pipeline; apprentice.keyed.Dropout's do not"
            rank_zero_warn(f"{', '.join(listed)}: noise from torch's generator; {advice}")
        listed = stages.batch_norms(module)
        if listed and self.exact is None and self.plan.num_microbatches > 1:
            advice = "GroupNorm's numbers are those of one device"
            rank_zero_warn(f"{', '.join(listed)}: BatchNorm sees a micro-batch, not the batch; {advice}")

    def _seconds(self, module: LightningModule, modules: list[nn.Module]) -> list[float]:
        """What each module takes for a micro-batch, measured on rank zero; others need not say."""
        raise NotImplementedError

    def _settled(self, place: Place) -> None:
        """Take note of where stages are."""

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        """Stands in for the module's `forward`, on all ranks at once."""
        raise NotImplementedError

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
        residence, self._residence = self._residence, None
        vars(module).pop("forward", None)
        vars(self.precision_plugin).pop("clip_grad_by_norm", None)
        try:
            if residence is not None and self._interrupted:
                residence.give_up()
            elif residence is not None:
                residence.undo()
            self._set_metrics_group(None)
        finally:
            replicas.set_group(None)
            super().teardown()
