"""The whole model on every rank, with averaged gradients: by DistributedDataParallel, or by the code of a strategy."""

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from apprentice.errors import BadInput
from strategies.base.data_parallel import DataParallel
from strategies.base.model_parallel import ModelParallel, devices_of
from strategies.base.private import register_ddp_comm_hook, sync_module_states
from strategies.base.steps import PlainSteps
from strategies.exact import ExactSteps

# Options of DistributedDataParallel that pass through `**kwargs`; the strategy sets the devices.
WRAPPER = inspect.signature(DistributedDataParallel).parameters.keys() - {"module", "device_ids", "output_device"}

SET_BY_HOOK = "exact", "ddp_comm_state", "ddp_comm_hook", "ddp_comm_wrapper", "model_averaging_period"


class AveragesGradients(DataParallel):
    """Data parallelism that has to know in advance whose gradients it averages, as parameters may be unfrozen in a fit.

    `_averaged` holds these parameters, or is None: there is nothing to know.
    """

    _averaged: set[nn.Parameter] | None = None

    def _ever_trained(self) -> set[nn.Parameter]:
        """Return the parameters that require a gradient or have required one in this fit."""
        known = self._averaged or set()
        return {p for p in self._module.parameters() if p.requires_grad or p in known}

    def _find_unaveraged(self) -> list[str]:
        """Return the names of the parameters that require a gradient which is not averaged."""
        known, parameters = self._averaged, self._module.named_parameters()
        return [] if known is None else [name for name, p in parameters if p.requires_grad and p not in known]

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Average unfrozen parameters from now on; frozen ones stay known, as they may be trained again."""
        if self._find_unaveraged():
            self._average_unfrozen(batch_idx)

    def _average_unfrozen(self, batch_idx: int) -> None:
        """Average the gradients of all of `_ever_trained` from this batch on."""
        raise NotImplementedError

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Check that no parameter was unfrozen since the batch started: its gradient would not be averaged."""
        if unknown := self._find_unaveraged():
            expected = "it to be unfrozen in on_train_batch_start or earlier, as its gradient is not averaged"
            raise BadInput("", f"parameter {unknown[0]}", expected)
        super().pre_backward(closure_loss)


class DDP(AveragesGradients):
    """Lightning's distributed data parallel, forked on CPU; it can be exact.

    DistributedDataParallel averages gradients while backward runs. A rank whose module is a ModelParallel has as many
    GPUs as that has stages; batches go to the last.

    Args:
        find_unused_parameters: look in each step for parameters that the loss does not depend on.
        static_graph: the same parameters are used at every step, which saves some work.
        gradient_as_bucket_view: keep gradients in the buffers they are sent from, which saves their memory once.
        bucket_cap_mb: MiB of gradients that are sent together; None: torch's choice.
        ddp_comm_state: the state that the hook gets.
        ddp_comm_hook: communicates a bucket of gradients.
        ddp_comm_wrapper: wraps the hook.
        model_averaging_period: steps between two averagings of the parameters; only for a PostLocalSGDState.
        exact: number of shards of a batch, and the largest number of devices, for bits that don't depend on it, as
            ExactSteps says; None for plain data parallelism.
        **kwargs: DistributedDataParallel's other options, and DataParallel's.
    """

    saves_alone = True

    def __init__(
        self,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        gradient_as_bucket_view: bool = False,
        bucket_cap_mb: int | None = None,
        ddp_comm_state: object | None = None,
        ddp_comm_hook: Callable[..., Any] | None = None,
        ddp_comm_wrapper: Callable[..., Any] | None = None,
        model_averaging_period: int | None = None,
        *,
        exact: int | None = None,
        **kwargs: Any,
    ) -> None:
        wrapper = {name: kwargs.pop(name) for name in WRAPPER & kwargs.keys()}
        super().__init__(**kwargs)
        self.exact = exact
        self._ddp_comm_state, self._ddp_comm_hook = ddp_comm_state, ddp_comm_hook
        self._ddp_comm_wrapper, self._model_averaging_period = ddp_comm_wrapper, model_averaging_period
        self._ddp_kwargs = wrapper | {
            "find_unused_parameters": find_unused_parameters,
            "static_graph": static_graph,
            "gradient_as_bucket_view": gradient_as_bucket_view,
            "bucket_cap_mb": bucket_cap_mb,
        }
        self._splits: list[ModelParallel] = []
        self._unplaced: list[ModelParallel] = []  # those whose devices this strategy chooses
        self._split_devices: list[torch.device] | None = None

    def _make_steps(self, shards: int | None) -> PlainSteps:
        return PlainSteps() if shards is None else ExactSteps(self, shards)

    def _check_devices(self) -> None:
        super()._check_devices()
        if self.exact is not None and self._ddp_comm_hook is not None:
            raise self._fault("no ddp_comm_hook, as gradients are added as whole numbers")

    def configure_ddp(self) -> None:
        """Wrap the module; without a wrapper, as exact steps need none, ranks start with rank zero's states."""
        if self.exact is not None:
            sync_module_states(self._module)
            return
        # A share without rows has gradients in another memory order.
        warnings.filterwarnings("ignore", "Grad strides do not match bucket view strides", UserWarning)
        self._pl_static_graph_delay_done = False  # Lightning's flag for the last wrapper
        super().configure_ddp()
        self._averaged = {p for p in self._module.parameters() if p.requires_grad}

    def _average_unfrozen(self, batch_idx: int) -> None:
        """Wrap the module again, without a broadcast: replicas are equal, or differ on purpose as in LocalSGD."""
        options, flags = self._ddp_kwargs, {p: p.requires_grad for p in self._ever_trained()}
        if options["find_unused_parameters"] and batch_idx % self._trainer.accumulate_grad_batches:
            # Only the old wrapper knows which parameters the accumulated batches have used.
            expected = "parameters to be unfrozen at the first of accumulated batches"
            raise BadInput("", f"batch {batch_idx} with find_unused_parameters", expected)
        try:
            for p in flags:
                p.requires_grad_(True)
            self.model, self._ddp_kwargs = self._module, options | {"init_sync": False}
            self.configure_ddp()
        finally:
            self._ddp_kwargs = options
            for p, flag in flags.items():
                p.requires_grad_(flag)

    def _register_ddp_hooks(self) -> None:
        """Register the communication hook on any device; Lightning silently ignores it on CPU."""
        if self._ddp_comm_hook is not None:
            assert isinstance(self.model, DistributedDataParallel)
            register_ddp_comm_hook(self.model, self._ddp_comm_state, self._ddp_comm_hook, self._ddp_comm_wrapper)

    @property
    def root_device(self) -> torch.device:
        """The last of a split module's devices, for batches and all parameters that are not in a stage."""
        return super().root_device if self._split_devices is None else self._split_devices[-1]

    def setup_environment(self) -> None:
        self._splits = self._split_parts()
        self._unplaced = [split for split in self._splits if split.devices is None]
        self._split_devices = next((split.devices for split in self._splits), None)
        self.undo.callback(setattr, self, "_split_devices", None)
        self.undo.callback(self._splits.clear)
        self.undo.callback(self._unplaced.clear)
        if self._unplaced:
            assert self.parallel_devices is not None
            sizes = sorted({split.num_stages for split in self._unplaced})
            if len(sizes) > 1:
                raise BadInput("", "ModelParallel", f"one number of stages throughout a module, got {sizes}")
            gpus, devices = torch.cuda.device_count(), self.parallel_devices
            self._split_devices = devices_of(self.local_rank, sizes[0], devices, gpus)
        if self._one_device and len(set(self._split_devices or [])) > 1:
            raise BadInput("", "strategy", "plain ddp, without exact, for a ModelParallel on several GPUs")
        super().setup_environment()

    @property
    def _one_device(self) -> bool:
        """Whether a rank needs its parameters on one device."""
        return self.exact is not None

    def _split_parts(self) -> list[ModelParallel]:
        return [part for part in self._module.modules() if isinstance(part, ModelParallel)]

    def _bound_device(self) -> torch.device | None:
        """Return None for a rank with several devices: bound to one of them NCCL refuses tensors of another."""
        return super()._bound_device() if self._split_devices is None else None

    def model_to_device(self) -> None:
        """Move the module to this rank's device, and each stage of a split module to its own."""
        if any(split not in self._splits for split in self._split_parts()):
            raise BadInput("", "ModelParallel", "one that is made in the module's constructor, not in a later hook")
        for split in self._unplaced:
            self.undo.callback(split.place, None)
            split.place(self._split_devices)
        super().model_to_device()

    def _setup_model(self, model: nn.Module) -> Any:
        if self.exact is not None:
            return model
        for split in self._splits:
            if self.world_size > 1 and split.split_size is not None and (layers := split.gathering_layers()):
                why = f"as {layers[0]} computes over all ranks, and they can have different numbers of splits"
                raise BadInput("split_size", split.split_size, f"None, {why}")
        # On the stream of forward, not on one of its own as Lightning does: torch warns of two, whose gradients wait.
        device_ids = self.determine_ddp_device_ids() if self._split_devices is None else None
        return DistributedDataParallel(model, device_ids, **self._ddp_kwargs)

    def on_train_start(self) -> None:
        """Move optimizer states, which Lightning has loaded to one device, to their parameters' devices."""
        if self._split_devices is None:
            return
        for optimizer in self.optimizers:
            for p, state in optimizer.state.items():
                state |= {key: x.to(p.device) for key, x in state.items() if isinstance(x, Tensor) and key != "step"}
