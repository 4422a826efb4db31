"""Callbacks of tests: each rank notes facts in a file; batches are kept; a checkpoint is saved at a certain step."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer


class Notes(Callback):
    """Each rank writes down a fact whenever one of these hooks is called.

    Args:
        folder: for a file of each rank; it is made.
        fact: what can be JSON, from trainer and module.
        *hooks: their names.
    """

    def __init__(self, folder: Path, fact: Callable[[Any, Any], Any], *hooks: str) -> None:
        self.folder, self.fact = folder, fact
        folder.mkdir(exist_ok=True)
        for hook in hooks:
            setattr(self, hook, self._note)

    def _note(self, trainer: Trainer, module: Any, *_: Any) -> None:
        with (self.folder / f"{trainer.global_rank}.jsonl").open("a") as file:
            file.write(json.dumps(self.fact(trainer, module)) + "\n")

    def of_ranks(self) -> list[list[Any]]:
        """The facts of each rank in order."""
        files = sorted(self.folder.glob("*.jsonl"))
        return [[json.loads(line) for line in path.read_text().splitlines()] for path in files]


class SaveAndStop(Callback):
    """Saves before the batch of a step, and stops the fit as `SafePoints` does when a user interrupts, or goes on."""

    def __init__(self, path: Path, step: int, stop: bool = True) -> None:
        self.path, self.step, self.stop = path, step, stop

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)
            trainer.should_stop = trainer.should_stop or self.stop


class Seen(Callback):
    """Keeps the batches of each stage, and the steps that were done before those of training."""

    def __init__(self) -> None:
        self.train: list[Any] = []
        self.validation: list[Any] = []
        self.test: list[Any] = []
        self.steps: list[int] = []

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.train.append(batch)
        self.steps.append(trainer.global_step)

    def on_validation_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, *_: Any) -> None:
        self.validation.append(batch)

    def on_test_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, *_: Any) -> None:
        self.test.append(batch)


class Saver(Callback):
    """A checkpoint at each call of one hook, named by the steps done."""

    def __init__(self, folder: Path, hook: str) -> None:
        self.folder = folder
        setattr(self, hook, self.save)

    def save(self, trainer: Trainer, *args: object) -> None:
        if not trainer.sanity_checking:
            trainer.save_checkpoint(self.folder / f"{trainer.global_step}.ckpt")


class StopAt(Callback):
    """Stops a run before a step, as the end of its time does."""

    def __init__(self, run: str, step: int) -> None:
        self.run, self.step = run, step

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if trainer.global_step == self.step:
            pl_module.stop(self.run)
