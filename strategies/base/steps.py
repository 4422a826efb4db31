"""How a strategy runs batches: each rank its rows at once, as Lightning does, or in a way of a derived class."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lightning.pytorch import LightningModule, Trainer

if TYPE_CHECKING:
    from strategies.base.data_parallel import DataParallel


class PlainSteps:
    """Lets each rank compute its rows of a batch at once, as Lightning does.

    A strategy holds its steps and calls them where another way to run a batch would differ. `run` is what Lightning,
    or the strategy's other bases, would do.
    """

    needs_group = True  # whether a single process joins a process group, too
    relates_rows = True  # whether a loss may relate rows of the global batch
    shards: int | None = None  # into which a global batch is cut; None: each rank has its rows

    def __init__(self, strategy: "DataParallel") -> None:
        self.strategy = strategy

    @property
    def module(self) -> LightningModule:
        """The strategy's module."""
        return self.strategy._module

    def check_devices(self) -> None:
        """Raise BadInput, before ranks are started, where the devices don't fit."""

    def check_module(self, module: LightningModule) -> None:
        """Raise BadInput where the module can't be trained so."""

    def setup_environment(self) -> None:
        """Prepare the process."""

    def setup(self, trainer: Trainer) -> None:
        """Prepare the Trainer."""

    def batch_to_device(self, run: Callable[..., Any], batch: Any, *args: Any) -> Any:
        """Move the rows of a batch that this rank computes."""
        return run(batch, *args)

    def training_step(self, run: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the loss of a batch."""
        return run(batch, *args, **kwargs)

    def start_evaluation(self) -> None:
        """Begin to count batches."""

    def evaluation_step(self, run: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Validate or test a batch."""
        return run(batch, *args, **kwargs)

    def predict_step(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Predict a batch."""
        return run(*args, **kwargs)
