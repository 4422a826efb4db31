"""Callbacks of tests: each rank notes facts in a file; a checkpoint is saved at a certain step."""

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
