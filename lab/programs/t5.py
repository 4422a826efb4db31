"""A T5 of random weights under `fsdp`: trained by a plain LightningModule, saved, and loaded in two ways.

    python -m lab.programs.t5                 # 2 processes, then 3
    python -m lab.programs.t5 --devices 1 2

As PyTorch's tutorial on FSDP, which fine-tunes T5 to summarize and gathers a full checkpoint on rank 0. Neither the
module nor T5 knows of shards, and the checkpoint has the layout of one device. So `T5ForConditionalGeneration` loads it
in one process, and training resumes from it under `fsdp` on another number of processes, as if it had not stopped.

Needs `transformers`.
"""

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from apprentice.keyed import with_seed
from harness.runs.quiet import quiet
from strategies import FSDP

VOCABULARY, SOURCE, SUMMARY = 50, 12, 4  # tokens: 0 pads and begins, 1 ends; of a text and of its summary
ROWS, BATCH = 48, 12  # texts of the set; of a step, over all processes


def make_t5() -> Any:
    """Return a T5 of two blocks on each side, 32 wide, without dropout, from seed 0."""
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2}
    config = T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0)
    return with_seed(0, lambda: T5ForConditionalGeneration(config))


class Summarizer(LightningModule):
    """Learns to write a text's summary; it could train under any strategy."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_t5()

    def training_step(self, batch: list[Tensor], _batch_idx: int) -> Tensor:
        """Return the mean cross-entropy of the summary's tokens."""
        texts, summaries = batch
        loss: Tensor = self.net(input_ids=texts, labels=summaries).loss
        return loss

    def train_dataloader(self) -> DataLoader:
        """Return a loader of this process's share of each batch; in any number of shares the rows are the same."""
        share = self.trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        texts = make_texts()
        return DataLoader(texts, BATCH // share["num_replicas"], sampler=DistributedSampler(texts, **share))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 0.003)


def make_texts() -> TensorDataset:
    """Return random texts, (ROWS, SOURCE), whose summary, (ROWS, SUMMARY), is every fourth token and the end."""
    texts = with_seed(1, lambda: torch.randint(2, VOCABULARY, (ROWS, SOURCE)))
    summaries = torch.cat([texts[:, ::4], torch.ones(ROWS, 1, dtype=torch.int64)], 1)
    return TensorDataset(texts, summaries)


def fit(module: LightningModule, devices: int, epochs: int, checkpoint: Path | None = None) -> Trainer:
    """Train in float64 up to so many epochs, from a checkpoint if one is given; several processes share a batch."""
    options: dict[str, Any] = {"accelerator": "cpu", "devices": devices, "precision": "64-true", "max_epochs": epochs}
    options |= {"strategy": FSDP() if devices > 1 else "auto", "logger": False, "enable_checkpointing": False}
    options |= {"enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(**options)
    with quiet():
        trainer.fit(module, ckpt_path=checkpoint, weights_only=True)
    return trainer


def read_t5(checkpoint: Path) -> Any:
    """Load T5 from a checkpoint in this process, without Lightning."""
    net = make_t5().double()
    state = torch.load(checkpoint, weights_only=True, map_location="cpu")["state_dict"]
    net.load_state_dict({name.removeprefix("net."): value for name, value in state.items()})
    return net.eval()


def largest_difference(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """Return the largest difference of two equal values of weights."""
    return max((one[name] - other[name]).abs().max().item() for name in one.keys() | other.keys())


def main(argv: Sequence[str] | None = None) -> None:
    """Train an epoch on some processes, save, and train another on others."""
    command = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    command.add_argument("--devices", type=int, nargs=2, default=[2, 3], help="processes before and after the save")
    first, second = command.parse_args(argv).devices
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "t5.ckpt"
        module = Summarizer()
        fit(module, first, 1).save_checkpoint(checkpoint, weights_only=False)
        net, (texts, summaries) = read_t5(checkpoint), make_texts().tensors
        with torch.no_grad():
            print(f"saved by {first} processes, read by one: loss {net(input_ids=texts, labels=summaries).loss:.4f}")
        resumed, alone = Summarizer(), Summarizer()
        fit(resumed, second, 2, checkpoint)
        fit(alone, 1, 2)
    difference = largest_difference(resumed.state_dict(), alone.state_dict())
    print(f"resumed by {second}; like one process throughout, to 1e-9: {difference < 1e-9}")


if __name__ == "__main__":
    main()
