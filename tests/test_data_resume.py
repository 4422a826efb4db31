"""A fit resumed in mid-epoch sees the batches that an undisturbed one would have seen, and ends with its weights."""

from pathlib import Path

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
        return batch.mean(F.cross_entropy(self.net(batch.images.flatten(1)), batch.labels, reduction="none"))

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.validated.append((self.global_step, batch.index.tolist()))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class SaveEachStep(Callback):
    """A checkpoint from each call of one hook, named by the steps done."""

    def __init__(self, folder: Path, hook: str) -> None:
        self.folder, self.hook = folder, hook

    def save(self, trainer: Trainer) -> None:
        if not trainer.sanity_checking:
            trainer.save_checkpoint(self.folder / f"{trainer.global_step}.ckpt")

    def on_train_batch_end(self, trainer: Trainer, *args: object) -> None:
        if self.hook == "batch_end":
            self.save(trainer)

    def on_train_batch_start(self, trainer: Trainer, *args: object) -> None:
        if self.hook == "batch_start":
            self.save(trainer)

    def on_train_epoch_end(self, trainer: Trainer, *args: object) -> None:
        if self.hook == "epoch_end":
            self.save(trainer)

    def on_validation_end(self, trainer: Trainer, *args: object) -> None:
        if self.hook == "validation":
            self.save(trainer)


def data() -> Digits:
    module = Digits(batch_size=16, train_size=75, validation_size=40, test_size=10, augment=True)
    module.order_seed = 3
    return module


def fit(digits: Digits, callbacks: list[Callback], ckpt: Path | None = None, **options: object) -> Recorder:
    module = Recorder()
    trainer = Trainer(
        accelerator="cpu", devices=1, max_epochs=EPOCHS, callbacks=callbacks, logger=False, barebones=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, **options,
    )  # fmt: skip
    trainer.fit(module, datamodule=digits, ckpt_path=ckpt)
    return module


@pytest.mark.parametrize("hook", ["batch_start", "batch_end", "validation", "epoch_end"])
@pytest.mark.parametrize(
    "options",
    [{}, {"limit_train_batches": 3}, {"val_check_interval": 2}, {"max_steps": 12}],
    ids=str,
)
def test_resumed_fit_is_the_undisturbed_one(tmp_path: Path, hook: str, options: dict) -> None:
    digits = data()
    whole = fit(digits, [SaveEachStep(tmp_path, hook)], **options)
    batches = options.get("limit_train_batches", BATCHES)
    epochs = [[index for _, step, index in whole.seen if step // BATCHES == epoch] for epoch in range(EPOCHS)]
    assert [len(epoch) for epoch in epochs[:2]] == [batches, batches]
    assert epochs[0] != epochs[1] != epochs[2]
    checkpoints = sorted(tmp_path.glob("*.ckpt"))
    assert len(checkpoints) >= 2
    for checkpoint in checkpoints:
        resumed = fit(digits, [], checkpoint, **options)
        done = int(checkpoint.stem)
        assert resumed.seen == [seen for seen in whole.seen if seen[0] >= done], checkpoint.name
        assert torch.equal(resumed.net.weight, whole.net.weight), checkpoint.name
