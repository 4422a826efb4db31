"""The whole model on every rank, in torch's DistributedDataParallel."""

import warnings
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from strategies.base import DataParallel


class Replicated(DataParallel):
    """Wraps the module in DistributedDataParallel, which averages gradients while backward runs.

    Args:
        find_unused_parameters: look at each step for parameters that the loss does not depend on.
        static_graph: the same parameters are used at every step, which spares some work.
        gradient_as_bucket_view: let gradients lie where they are sent from, which saves their memory once.
        bucket_cap_mb: MiB of gradients that are sent together; torch's choice when not given.
        **kwargs: DataParallel's.
    """

    def __init__(
        self,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        gradient_as_bucket_view: bool = False,
        bucket_cap_mb: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self._ddp_kwargs = {
            "find_unused_parameters": find_unused_parameters,
            "static_graph": static_graph,
            "gradient_as_bucket_view": gradient_as_bucket_view,
            "bucket_cap_mb": bucket_cap_mb,
        }

    def configure_ddp(self) -> None:
        """Wrap the module; a share without rows has gradients in another memory order, which is no news to the user."""
        warnings.filterwarnings("ignore", "Grad strides do not match bucket view strides", UserWarning)
        super().configure_ddp()

    def _register_ddp_hooks(self) -> None:
        """Register the communication hook on any device: Lightning's own ignores it on CPU in silence."""
        if self._ddp_comm_hook is not None:
            assert isinstance(self.model, DistributedDataParallel)
            self.model.register_comm_hook(self._ddp_comm_state, self._ddp_comm_hook)
