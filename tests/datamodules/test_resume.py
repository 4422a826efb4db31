"""A fit resumed in mid-epoch sees the batches that an undisturbed one would have seen, and ends with its weights."""

from pathlib import Path
from typing import ClassVar

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from torch.nn import functional as F

from apprentice.batch import Batch
from datamodules import Digits

EPOCHS, BATCHES = 3, 5  # 75 samples in batches of 16


class Recorder(LightningModule):
    """A linear classifier with momentum that writes down which samples it sees, and when."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(64, 10)
        self.seen: list[tuple[int, int, list[int]]] = []
        self.validated: list[tuple[int, list[int]]] = []

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        self.seen.append((self.global_step, batch.step, batch.index.tolist()))
        return batch.mean(F.cross_entropy(self.net(batch.inputs.flatten(1)), batch.labels, reduction="none"))

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.validated.append((self.global_step, batch.index.tolist()))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Saver(Callback):
    """A checkpoint at each call of one hook, named by the steps done."""

    def __init__(self, folder: Path, hook: str) -> None:
        self.folder = folder
        setattr(self, hook, self.save)

    def save(self, trainer: Trainer, *args: object) -> None:
        if not trainer.sanity_checking:
            trainer.save_checkpoint(self.folder / f"{trainer.global_step}.ckpt")


def data(validation_size: int = 40) -> Digits:
    module = Digits(batch_size=16, train_size=75, validation_size=validation_size, test_size=10, augment=True)
    module.transforms = ["RandomVerticalFlip"]
    module.order_seed = 3
    return module


def fit(digits: Digits, callbacks: list[Callback], ckpt: Path | None = None, **options: object) -> Recorder:
    module = Recorder()
    trainer = Trainer(
        accelerator="cpu", devices=1, max_epochs=EPOCHS, callbacks=callbacks, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, **options,
    )  # fmt: skip
    trainer.fit(module, datamodule=digits, ckpt_path=ckpt)
    return module


MOMENTS = "train_batch_start", "train_batch_end", "validation_batch_end", "validation_end", "train_epoch_end"
HOOKS = [f"on_{moment}" for moment in MOMENTS]
OPTIONS: list[dict] = [{}, {"limit_train_batches": 3}, {"val_check_interval": 2}, {"max_steps": 12}]
# Lightning, with any loader, miscounts epochs when max_steps is given and it resumes from an epoch's end.
CASES = [
    (hook, options) for hook in HOOKS for options in OPTIONS if (hook, *options) != ("on_train_epoch_end", "max_steps")
]


@pytest.mark.parametrize(("hook", "options"), CASES, ids=str)
def test_resumed_fit_is_the_undisturbed_one(tmp_path: Path, hook: str, options: dict) -> None:
    digits = data()
    whole = fit(digits, [Saver(tmp_path, hook)], **options)
    batches = options.get("limit_train_batches", BATCHES)
    epochs = [[index for _, step, index in whole.seen if step // BATCHES == epoch] for epoch in range(EPOCHS)]
    assert [len(epoch) for epoch in epochs[:2]] == [batches, batches]
    assert epochs[0] != epochs[1] != epochs[2]
    checkpoints = list(tmp_path.glob("*.ckpt"))
    assert len(checkpoints) >= 2
    for checkpoint in checkpoints:
        resumed = fit(digits, [], checkpoint, **options)
        assert resumed.seen == [seen for seen in whole.seen if seen[0] >= int(checkpoint.stem)], checkpoint.name
        assert torch.equal(resumed.net.weight, whole.net.weight), checkpoint.name


def test_resumed_without_validation(tmp_path: Path) -> None:
    digits = data(validation_size=0)
    whole = fit(digits, [Saver(tmp_path, "on_train_batch_end")])
    for done in (3, 5, 11):
        resumed = fit(digits, [], tmp_path / f"{done}.ckpt")
        assert resumed.seen == whole.seen[done:]
        assert torch.equal(resumed.net.weight, whole.net.weight)


def test_other_passes_during_and_after_a_fit_are_whole() -> None:
    """Only Lightning's own pass goes on where its progress stands."""

    class Passes(Callback):
        lengths: ClassVar[list[int]] = []

        def on_train_batch_end(self, trainer: Trainer, *args: object) -> None:
            self.lengths.append(len(list(trainer.datamodule.train_dataloader())))
            self.lengths.append(len(list(trainer.train_dataloader)))

    digits = data()
    fit(digits, [Passes()])
    assert Passes.lengths == [BATCHES] * 2 * EPOCHS * BATCHES
    assert len(list(digits.train_dataloader())) == BATCHES


def test_checkpoint_holds_no_loader_state(tmp_path: Path) -> None:
    fit(data(), [Saver(tmp_path, "on_train_batch_end")])
    checkpoint = torch.load(tmp_path / "7.ckpt", weights_only=True)
    assert checkpoint["loops"]["fit_loop"]["state_dict"] == {"combined_loader": [{}]}
    assert "Digits" not in checkpoint
