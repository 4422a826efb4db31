"""How a strategy runs a batch: at once, as Lightning does. `exact.steps` has another way."""

from collections.abc import Callable
from typing import Any

from lightning.pytorch import LightningModule, Trainer


class PlainSteps:
    """Lets each rank compute its rows of a batch at once.

    A strategy holds its steps and calls them where another way to run a batch would differ. `run` is what Lightning
    would do.
    """

    shards: int | None = None  # into which a global batch is cut; None: each rank has its rows
    has_own_rows = True  # whether a rank's loader yields the rows of this rank alone

    def needs_group(self) -> bool:
        """Whether the ranks, perhaps one alone, have to be in a process group."""
        return True

    def check_devices(self) -> None:
        """Raise BadInput where these devices can't run batches so."""

    def check_module(self, module: LightningModule) -> None:
        """Raise BadInput for a module whose batches can't be run so."""

    def setup_environment(self) -> None:
        """Prepare the process."""

    def setup(self, trainer: Trainer) -> None:
        """Prepare the Trainer."""

    def batch_to_device(self, run: Callable[..., Any], batch: Any, *args: Any) -> Any:
        return run(batch, *args)

    def training_step(self, run: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
        return run(batch, *args, **kwargs)

    def start_evaluation(self) -> None:
        """Begin to count batches."""

    def evaluation_step(self, run: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
        return run(batch, *args, **kwargs)

    def predict_step(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return run(*args, **kwargs)
