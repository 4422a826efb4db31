"""Fully sharded data parallelism: each rank keeps a part of parameters, gradients and optimizer state."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import FSDPStrategy
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from apprentice import replicas
from apprentice.contract import HasMaps
from apprentice.errors import BadInput
from strategies import tensor_parallel
from strategies.base import checkpoints
from strategies.base.gradients import NORM, parameters_of
from strategies.base.private import NormBase, sync_module_states
from strategies.base.shared_replica import SharedReplica
from strategies.sharding import Sharding, recompute
from strategies.tensor_parallel import DATA, TENSOR

Half = Literal["bf16", "fp16"]
# What torch says where a loss or a hook needs what a rank has a part of, and what we say.
EXPECTED = {
    "mixed torch.Tensor and DTensor": "reshard_after_forward False and a loss that uses parameters after "
    "forward only, as each rank has a part of them before",
    "for storage of size 0": "reshard_after_forward False, as the loss uses gradients of gradients, for which "
    "layers are no longer whole",
    "data is not allocated yet": f"{NORM}, as each rank has a part of a gradient",
}
DTYPES = {None: None, "bf16": torch.bfloat16, "fp16": torch.float16}


class FSDP(SharedReplica):
    """Shards parameters, gradients and optimizer state over the ranks; a layer's are gathered while it is computed.

    It shards the modules that the LightningModule's layout names (`apprentice.contract`), or else its children; each
    has to be called through its own `forward`. Inside, each member of an `nn.Sequential` or `nn.ModuleList` is a layer.
    Checkpoints have the layout of one device. A device needs room for the whole model at the start, and the CPU at the
    end, when each rank's module is made whole again.

    Args:
        param_dtype: rounds parameters and inputs for forward and backward; None: no rounding.
        reduce_dtype: rounds gradients for averaging; None: no rounding.
        offload: keep the shards in the CPU's memory, beside a GPU.
        activation_checkpointing: store only a layer's inputs and buffers for backward, and recompute the layer.
        reshard_after_forward: free a layer's parameters after forward; else after backward of the whole loss, as one
            wants that uses parameters or gradients of gradients, such as an L1 or a gradient penalty.
        mesh: sizes of `data` and `tensor`, or a DeviceMesh of these dimensions. Consecutive ranks, along `tensor`,
            compute the layers of a net together, as its `tensor_parallel_plan()` says: styles of
            `torch.distributed.tensor.parallel` by the path of a layer. Each rank's part is sharded along `data`. A size
            that is left out follows from the number of devices.
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
        mesh: dict[str, int] | DeviceMesh | None = None,
        **kwargs: Any,
    ) -> None:
        for name, value in {"param_dtype": param_dtype, "reduce_dtype": reduce_dtype}.items():
            if value not in DTYPES:
                raise BadInput(name, value, "bf16 or fp16")
        super().__init__(**kwargs)
        self.param_dtype, self.reduce_dtype = DTYPES[param_dtype], DTYPES[reduce_dtype]
        self.offload, self.activation_checkpointing = offload, activation_checkpointing
        self.reshard_after_forward = reshard_after_forward
        self.mesh = mesh
        self._tensor_mesh: DeviceMesh | None = None
        self._sharding: Sharding | None = None

    @contextmanager
    def _explain_errors(self) -> Iterator[None]:
        """Raise BadInput with what was expected in place of torch's error about its shards."""
        try:
            yield
        except RuntimeError as error:
            expected = next((text for sign, text in EXPECTED.items() if sign in str(error)), None)
            if expected is None:
                raise
            raise BadInput("", f"strategy {type(self).__name__}: {type(self._module).__name__}", expected) from error

    def _sharded_modules(self) -> list[FSDPModule]:
        return [module for module in self._module.modules() if isinstance(module, FSDPModule)]

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Compute gradients, and free parameters that were kept whole for that."""
        self.pre_backward(closure_loss)
        loss = self.precision_plugin.pre_backward(closure_loss, self._module)
        with self._explain_errors():
            self.precision_plugin.backward(loss, self._module, optimizer, *args, **kwargs)
        if not self.reshard_after_forward:
            for module in self._sharded_modules():
                module.reshard()
        loss = self.precision_plugin.post_backward(loss, self._module)
        self.post_backward(loss)
        return loss

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        with self._explain_errors():
            return super().optimizer_step(optimizer, closure, model, **kwargs)

    @property
    def replica_size(self) -> int:
        return 1 if self.mesh is None else tensor_parallel.sizes(self.mesh, self._num_ranks)[1]

    def _check_devices(self) -> None:
        super()._check_devices()
        if self.mesh is not None:
            tensor_parallel.sizes(self.mesh, self._num_ranks)
        if self.offload and self.root_device.type == "cpu":
            raise BadInput("offload", "True", "False, as the devices are CPUs and all is in their memory")

    def _get_process_group_backend(self) -> str:
        backend = super()._get_process_group_backend()
        if self.offload and ":" not in backend:
            return f"cpu:gloo,{self.root_device.type}:{backend}"  # norms of offloaded gradients are added on the CPU
        return backend

    def check_trainer(self, trainer: Trainer) -> None:
        super().check_trainer(trainer)
        self._refuse_averaging(trainer)

    def check_module(self, module: LightningModule) -> None:
        """Raise BadInput if a replica has several ranks, which can't compute this module together."""
        super().check_module(module)
        if self.mesh is not None and self.replica_size > 1:
            tensor_parallel.check(module, self.mesh, self.replica_size)

    def setup_environment(self) -> None:
        """Join the process group, and make the mesh."""
        super().setup_environment()
        self._mesh = self._make_mesh()
        if self._tensor_mesh is not None:
            self.undo.callback(replicas.set_group, None)
            replicas.set_group(self._mesh.get_group())

    def setup(self, trainer: Trainer) -> None:
        self.check_trainer(trainer)
        if self._tensor_mesh is not None:
            if self.replica[1] == 1:
                self._read_whole_batches(trainer)
            self._reduce_metrics(replicas.group())
            self.replace(self.precision_plugin, "clip_grad_by_norm", self._clip_by_norm)
        super().setup(trainer)

    def configure_ddp(self) -> None:
        """Shard the module instead of wrapping it."""
        sync_module_states(self._module)
        try:
            self._sharding = Sharding(self._module, self._shard, self._cut)
        except ValueError as error:
            raise MisconfigurationException(str(error)) from error
        for module in self._sharded_modules():
            module.set_reshard_after_backward(self.reshard_after_forward, recurse=False)

    def _make_mesh(self) -> DeviceMesh:
        """Return the ranks that shard a parameter, and keep those that compute a replica with this one."""
        if self.replica_size == 1:
            return init_device_mesh(self.root_device.type, (self.world_size,))
        mesh = self.mesh
        if not isinstance(mesh, DeviceMesh):
            shape = self.world_size // self.replica_size, self.replica_size
            mesh = init_device_mesh(self.root_device.type, shape, mesh_dim_names=(DATA, TENSOR))
        self._tensor_mesh = mesh[TENSOR]
        return mesh[DATA]

    def _cut(self, module: nn.Module) -> None:
        """Leave this rank its part of the layers that several ranks compute."""
        if self._tensor_mesh is not None and not tensor_parallel.cut(module, self._tensor_mesh):
            name = type(module).__name__
            rank_zero_info(
                f"{name} has no tensor_parallel_plan(): ranks that compute a net together each compute all of it"
            )

    def _shard(self, module: nn.Module, is_layer: bool) -> None:
        if is_layer and self.activation_checkpointing:
            recompute(module)
        offload = CPUOffloadPolicy() if self.offload else OffloadPolicy()
        options: dict[str, Any] = {"reshard_after_forward": self.reshard_after_forward, "offload_policy": offload}
        norms = [m for m in module.modules() if self.param_dtype is not None and isinstance(m, NormBase)]
        for m in dict.fromkeys([*norms, module]):
            if not isinstance(m, FSDPModule):
                fully_shard(m, mesh=self._mesh, mp_policy=self._policy(m, is_layer), **options)
                if isinstance(m, HasMaps):
                    register_fsdp_forward_method(m, "weights")

    def _policy(self, module: nn.Module, is_layer: bool) -> MixedPrecisionPolicy:
        if self.param_dtype is None:
            return MixedPrecisionPolicy(reduce_dtype=self.reduce_dtype)
        if isinstance(module, NormBase):  # its averages are not rounded, and torch wants weights of their type
            return MixedPrecisionPolicy(reduce_dtype=self.reduce_dtype, cast_forward_inputs=False)
        dtype = next(module.parameters()).dtype
        output = None if is_layer else dtype  # full precision for losses
        return MixedPrecisionPolicy(self.param_dtype, self.reduce_dtype or dtype, output_dtype=output)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Accumulate gradients without averaging inside the block."""
        for module in self._sharded_modules():
            module.set_requires_gradient_sync(False, recurse=False)
        try:
            yield
        finally:
            for module in self._sharded_modules():
                module.set_requires_gradient_sync(True, recurse=False)

    def gradient_norm(self, parameters: Iterable[nn.Parameter]) -> Tensor | None:
        """Return the norm of all gradients, () float64; None if there are none; collective."""
        total = torch.zeros((), dtype=torch.float64, device=self.root_device)
        gradients = [cast("DTensor", p.grad) for p in parameters if p.grad is not None]
        for gradient in gradients:
            shape = gradient.device_mesh.shape
            shards = math.prod(shape[i] for i, place in enumerate(gradient.placements) if not place.is_replicate())
            square = gradient.to_local().double().square().sum().to(self.root_device)
            total += square * shards / self.world_size  # as many ranks have these values
        dist.all_reduce(total)
        return total.sqrt() if gradients else None

    def _clip_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        """Clip by the norm over all ranks; torch adds up no gradients of which only some are cut."""
        parameters = [p for p in parameters_of(optimizer) if p.grad is not None]
        if (total := self.gradient_norm(parameters)) is not None:
            nn.utils.clip_grads_with_norm_(parameters, clip_val, total.to(parameters[0].dtype), foreach=False)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the module's state, on rank zero; collective."""
        orders, keep = self._orders_by_name(), self.is_global_zero
        state = self._module.state_dict()
        full = {key: checkpoints.gather_tree(value, keep, orders.get(key)) for key, value in state.items()}
        return full if keep else {}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load a module's state that any strategy has saved."""
        orders, local = self._orders_by_name(), self._module.state_dict()
        full = checkpoint["state_dict"].items()
        state = {key: checkpoints.shard_like(value, local.get(key), orders.get(key)) for key, value in full}
        self._module.load_state_dict(state, strict=strict)

    def _orders_by_name(self) -> dict[str, Tensor]:
        """Return the rows' order of each parameter that is cut in another order than one device's."""
        orders = self._orders()
        return {key: orders[p] for key, p in self._module.named_parameters() if p in orders}

    def _orders(self) -> dict[nn.Parameter, Tensor]:
        pairs = [(layer, tensor_parallel.order(layer)) for layer in self._module.modules()]
        return {p: order for layer, order in pairs if order is not None for p in layer.parameters(recurse=False)}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the optimizer's state, on rank zero; collective."""
        optimizer = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        state, orders, keep = optimizer.state_dict(), self._orders(), self.is_global_zero
        parameters = parameters_of(optimizer)
        states = {i: checkpoints.gather_tree(x, keep, orders.get(parameters[i])) for i, x in state["state"].items()}
        return {**state, "state": states} if keep else {}

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load optimizers' states that any strategy has saved; what has its parameter's shape is sharded like it."""
        orders: dict[Any, Tensor] = self._orders()
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            numbers = [number for group in state["param_groups"] for number in group["params"]]
            parameters = dict(zip(numbers, parameters_of(optimizer), strict=False))  # torch refuses another length
            states = {
                n: {key: checkpoints.shard_like(x, p := parameters.get(n), orders.get(p)) for key, x in values.items()}
                for n, values in state["state"].items()
            }
            optimizer.load_state_dict({**state, "state": states})

    def teardown(self) -> None:
        """Make the module whole again on each rank, or leave it sharded, where other ranks may have gone."""
        if self._sharding is not None and (self.world_size == 1 or not self._interrupted):
            self._sharding.undo()
        self._sharding = self._tensor_mesh = None
        super().teardown()
