"""Fully sharded data parallelism: each rank keeps a part of parameters, gradients and optimizer state."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.overrides.distributed import _sync_module_states
from lightning.pytorch.strategies import FSDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer

from strategies.base import checkpoints
from strategies.base.data_parallel import DataParallel
from strategies.base.gradients import parameters_of
from strategies.sharding import Sharding, recompute

Half = Literal["bf16", "fp16"]
DTYPES = {None: None, "bf16": torch.bfloat16, "fp16": torch.float16}


class FSDP(DataParallel):
    """Shards parameters, gradients and optimizer state over the ranks; a layer's are gathered while it is computed.

    It shards the modules that the LightningModule's `sharded_modules()` returns, or else its children; each has to be
    called through its own `forward`. Inside, each member of an `nn.Sequential` or `nn.ModuleList` is a layer.
    Checkpoints have the layout of one device. A device needs room for the whole model at the start, and the CPU at the
    end, when each rank's module is made whole again.

    Args:
        param_dtype: rounds parameters and inputs for forward and backward; None: no rounding.
        reduce_dtype: rounds gradients for averaging; None: no rounding.
        offload: keep the shards in the CPU's memory, beside a GPU.
        activation_checkpointing: store only a layer's inputs for backward, and recompute the layer.
        reshard_after_forward: free a layer's parameters after forward; else only after backward.
    """

    replaces = FSDPStrategy  # in Lightning's registry
    restore_checkpoint_after_setup = True  # states are sharded like the parameters

    def __init__(
        self,
        param_dtype: Half | None = None,
        reduce_dtype: Half | None = None,
        offload: bool = False,
        activation_checkpointing: bool = False,
        reshard_after_forward: bool = True,
        **kwargs: Any,
    ) -> None:
        for name, value in {"param_dtype": param_dtype, "reduce_dtype": reduce_dtype}.items():
            if value not in DTYPES:
                raise ValueError(f"{name} {value}: expected bf16 or fp16")
        super().__init__(**kwargs)
        self.param_dtype, self.reduce_dtype = DTYPES[param_dtype], DTYPES[reduce_dtype]
        self.offload, self.activation_checkpointing = offload, activation_checkpointing
        self.reshard_after_forward = reshard_after_forward
        self._sharding: Sharding | None = None

    def _check_devices(self) -> None:
        super()._check_devices()
        if self.offload and self.root_device.type == "cpu":
            raise ValueError("offload True: expected False, as the devices are CPUs and all is in their memory")

    def _get_process_group_backend(self) -> str:
        backend = super()._get_process_group_backend()
        if self.offload and ":" not in backend:
            return f"cpu:gloo,{self.root_device.type}:{backend}"  # norms of offloaded gradients are added on the CPU
        return backend

    def check_trainer(self, trainer: Trainer) -> None:
        """Raise ValueError for callbacks that average weights."""
        super().check_trainer(trainer)
        averaging = StochasticWeightAveraging, WeightAveraging
        self._refuse_callbacks(trainer, averaging, "none that averages weights, which no rank has all of")

    def setup(self, trainer: Trainer) -> None:
        """Set the module up, unless a callback averages weights."""
        self.check_trainer(trainer)
        super().setup(trainer)

    def configure_ddp(self) -> None:
        """Shard the module instead of wrapping it."""
        _sync_module_states(self._module)
        self._interrupted, self._mesh = False, self._make_mesh()
        try:
            self._sharding = Sharding(self._module, self._shard)
        except ValueError as error:
            raise MisconfigurationException(str(error)) from error

    def _make_mesh(self) -> DeviceMesh:
        return init_device_mesh(self.root_device.type, (self.world_size,))

    def _shard(self, module: nn.Module, is_layer: bool) -> None:
        if is_layer and self.activation_checkpointing:
            recompute(module)
        offload = CPUOffloadPolicy() if self.offload else OffloadPolicy()
        options: dict[str, Any] = {"reshard_after_forward": self.reshard_after_forward, "offload_policy": offload}
        norms = [m for m in module.modules() if self.param_dtype is not None and isinstance(m, _NormBase)]
        for m in dict.fromkeys([*norms, module]):
            if not isinstance(m, FSDPModule):
                fully_shard(m, mesh=self._mesh, mp_policy=self._policy(m, is_layer), **options)

    def _policy(self, module: nn.Module, is_layer: bool) -> MixedPrecisionPolicy:
        if self.param_dtype is None:
            return MixedPrecisionPolicy(reduce_dtype=self.reduce_dtype)
        if isinstance(module, _NormBase):  # its averages are not rounded, and torch wants weights of their type
            return MixedPrecisionPolicy(reduce_dtype=self.reduce_dtype, cast_forward_inputs=False)
        own = next(module.parameters()).dtype
        output = None if is_layer else own  # full precision for losses
        return MixedPrecisionPolicy(self.param_dtype, self.reduce_dtype or own, output_dtype=output)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Accumulate gradients without averaging inside the block."""
        sharded = [module for module in self._module.modules() if isinstance(module, FSDPModule)]
        for module in sharded:
            module.set_requires_gradient_sync(False, recurse=False)
        try:
            yield
        finally:
            for module in sharded:
                module.set_requires_gradient_sync(True, recurse=False)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The module's state, on rank zero; collective."""
        return checkpoints.collected(self._module.state_dict(), self.is_global_zero)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load a module's state that any strategy has saved."""
        own = self._module.state_dict()
        state = {key: checkpoints.sharded(value, own.get(key)) for key, value in checkpoint["state_dict"].items()}
        self._module.load_state_dict(state, strict=strict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The optimizer's state, on rank zero; collective."""
        optimizer = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        return checkpoints.collected(optimizer.state_dict(), self.is_global_zero)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load optimizers' states that any strategy has saved; what has its parameter's shape is sharded like it."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            numbers = [number for group in state["param_groups"] for number in group["params"]]
            own = dict(zip(numbers, parameters_of(optimizer), strict=False))  # torch refuses another length
            kept = state["state"].items()
            states = {n: {key: checkpoints.sharded(x, own.get(n)) for key, x in of.items()} for n, of in kept}
            optimizer.load_state_dict({**state, "state": states})

    def on_exception(self, exception: BaseException) -> None:
        """Leave the module sharded, as other ranks may have gone."""
        self._interrupted = True
        super().on_exception(exception)

    def teardown(self) -> None:
        """Make the module whole again on each rank."""
        if self._sharding is not None and (self.world_size == 1 or not self._interrupted):
            self._sharding.undo()
        self._sharding = None
        super().teardown()
