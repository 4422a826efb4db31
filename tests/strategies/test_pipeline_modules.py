"""The pipeline under modules, data and trainers of others: the same as on one device, in the order of their loaders."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from harness.runs.quiet import quiet
from strategies import DDP
from tests.grids import mostly_slow
from tests.pipelines import Clock, Plain, Slow, ended, note_places, pairs, pipeline
from tests.processes import launch
from tests.training import LinesLogger, assert_same, trainer, weights


class Thaws(Callback):
    def on_train_epoch_start(self, trainer: Trainer, module: Any) -> None:
        module.net[0].requires_grad_(trainer.current_epoch > 0)


@pytest.mark.parametrize("schedule", ["1F1B", "InterleavedZeroBubble"])
def test_a_stage_that_is_unfrozen_on_the_way_trains(schedule: Any) -> None:
    one, _ = ended(Plain, callbacks=[Thaws()])
    both, _ = ended(Plain, pipeline(schedule=schedule), callbacks=[Thaws()])
    assert_same(one, both, atol=1e-9)


class Counts(Plain):
    """Gives a number that changes beside its output."""

    def __init__(self) -> None:
        super().__init__()
        self.net.append(Counted())

    def pipeline_loss(self, output: Any, batch: Any) -> torch.Tensor:
        return F.cross_entropy(output["x"], batch[1])

    def training_step(self, batch: Any) -> torch.Tensor:
        output = self(batch[0])
        self.log("calls", float(output["calls"]))
        return self.pipeline_loss(output, batch)


class Counted(nn.Module):
    calls = 0

    def forward(self, x: torch.Tensor) -> Any:
        self.calls += 1
        return {"x": x, "calls": self.calls}


def test_numbers_in_the_output_are_those_of_the_step(tmp_path: Path) -> None:
    logger = LinesLogger(tmp_path / "lines")
    ended(Counts, pipeline(num_microbatches=2), max_epochs=1, logger=logger, log_every_n_steps=1)
    assert logger.values("calls") == [2.0, 4.0, 6.0, 8.0, 10.0]  # one call was a trial; the first of a step's is told


class Scaled(nn.Linear):
    def forward(self, x: torch.Tensor, request: float = 1.0) -> torch.Tensor:
        return super().forward(x) * request


class Requests(Plain):
    """Asks its layers for something else in training, and in a test for both."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(Scaled(6, 6) for _ in range(4)))

    def forward(self, x: torch.Tensor, request: float = 1.0) -> torch.Tensor:
        for layer in self.net:
            x = layer(x, request=request)
        return x

    def training_step(self, batch: Any) -> torch.Tensor:
        return self.pipeline_loss(self(batch[0], request=0.5), batch)

    def test_step(self, batch: Any) -> None:
        self.log("plain", self(batch[0]).square().mean(), batch_size=len(batch[0]))
        self.log("doubled", self(batch[0], request=2.0).square().mean(), batch_size=len(batch[0]))


@pytest.mark.parametrize("exact", [None, 4])
def test_every_stage_gets_the_request_of_a_call(exact: int | None) -> None:
    one, module = ended(Requests, exact and DDP(timeout=60, exact=exact), devices=1)
    both, _ = ended(Requests, pipeline(exact=exact))
    assert_same(one, both, atol=0 if exact else 1e-9)
    with quiet():
        plain, piped = (
            trainer(count, strategy=strategy, precision="64-true").test(module, DataLoader(pairs(), 8), verbose=False)
            for count, strategy in ((1, "auto"), (2, pipeline(exact=exact)))
        )
    assert piped[0] == pytest.approx(plain[0], abs=1e-6)
    assert plain[0]["doubled"] != pytest.approx(plain[0]["plain"])


class Gathers(Plain):
    def training_step(self, batch: Any) -> torch.Tensor:
        self.log("gathered", self.all_gather(torch.ones(2)).sum())
        return super().training_step(batch)


@pytest.mark.filterwarnings("ignore:torch.distributed.nn.functional.all_gather is deprecated")
@pytest.mark.parametrize(("devices", "replicas"), [(2, 1), (4, 2)])
def test_what_is_gathered_is_gathered_from_replicas(devices: int, replicas: int, tmp_path: Path) -> None:
    logger = LinesLogger(tmp_path / "lines")
    strategy = pipeline(data_parallel_size=replicas)
    ended(Gathers, strategy, devices=devices, max_epochs=1, logger=logger, log_every_n_steps=1)
    assert logger.values("gathered")[0] == 2.0 * replicas


class Composed(Plain):
    example_input_array = torch.ones(2, 6)


class Adagrad(Plain):
    """Its optimizer has states from the start, its layers a buffer of a type that gloo does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.net[2].register_buffer("counts", torch.arange(5, dtype=torch.int16))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adagrad(self.parameters(), lr=0.1)


class Keeps(Callback):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_epoch_end(self, trainer: Trainer, module: Any) -> None:
        trainer.save_checkpoint(self.folder / "kept.ckpt")


@pytest.mark.parametrize("make", [Composed, Adagrad])
def test_what_others_do_ends_where_one_process_does(make: Any, tmp_path: Path) -> None:
    one, _ = ended(make)
    ended(make, pipeline(), devices=3, max_epochs=1, callbacks=[Keeps(tmp_path)])
    module, made = make(), trainer(2, strategy=pipeline(), max_epochs=3, precision="64-true")
    with quiet():
        made.fit(module, DataLoader(pairs(), batch_size=8), ckpt_path=tmp_path / "kept.ckpt", weights_only=True)
    assert_same(one, weights(module), atol=1e-9)


class TwoLoaders(Plain):
    """A dictionary of loaders; between two layers of a stage goes what could not go between stages."""

    def __init__(self) -> None:
        super().__init__(Slow(), Slow(), Wrapped(), Wrapped())

    def training_step(self, batch: Any) -> torch.Tensor:
        return super().training_step(batch["a"])

    def pipeline_loss(self, output: Any, batch: Any) -> torch.Tensor:
        return super().pipeline_loss(output, batch["a"] if isinstance(batch, dict) else batch)


class Wrapped(nn.Module):
    def forward(self, x: Any) -> Any:
        Clock.now += 1
        return x["x"] if isinstance(x, dict) else {"x": x}


def test_layers_are_timed_as_they_are_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strategies.pipeline.cutting.time", Clock())
    notes = note_places(tmp_path / "names")

    def loaders() -> Any:
        return {"a": DataLoader(pairs(), batch_size=8), "b": DataLoader(pairs(), batch_size=8)}

    one, _ = ended(TwoLoaders, data=loaders)
    both, _ = ended(TwoLoaders, pipeline(balance="time"), loaders, callbacks=[notes])
    assert notes.of_ranks()[0] == [["net.0.weight", "net.0.bias", "net.1.scale", "net.2.scale"]]
    assert_same(one, both, atol=1e-9)


class Uneven(Plain):
    """Some layers take all the time, another has nearly all parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 32), *(Slow() for _ in range(4)), nn.Linear(32, 32), nn.Linear(32, 3))


@pytest.mark.parametrize(("balance", "slow"), [("parameters", [1, 2, 3, 4]), ("time", [1, 2]), ([2, 5], [1])])
def test_stages_are_balanced(balance: Any, slow: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strategies.pipeline.cutting.time", Clock())
    notes = note_places(tmp_path / "names")
    both, _ = ended(Uneven, pipeline(balance=balance), max_epochs=1, callbacks=[notes])
    assert notes.of_ranks()[0] == [["net.0.weight", "net.0.bias", *(f"net.{n}.scale" for n in slow)]]
    assert_same(both, ended(Uneven, max_epochs=1)[0], atol=1e-9)  # measuring has left no trace


def fails(rank: int, folder: Path) -> None:
    """A script whose fit fails, as each rank of torchrun's runs it, and that goes on with another."""
    module = Plain(Breaks())
    try:
        ended(lambda: module, pipeline())
    except Exception as error:  # noqa: BLE001 - whatever it is, it is what the test asks for
        (folder / f"error{rank}").write_text(f"{type(error).__name__}: {error}")
    assert "forward" not in vars(module)
    assert not any(p.is_meta for p in module.parameters())


class Breaks(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise KeyError("a bug of a stage's")


def test_a_fit_that_fails_says_why_and_leaves_a_module(tmp_path: Path) -> None:
    for run in launch(fails, tmp_path):
        assert run.wait() == 0, run.output
    assert (tmp_path / "error1").read_text() == """KeyError: "a bug of a stage's\""""
    assert (tmp_path / "error0").read_text().startswith("ConnectionError: rank 1 has gone")


class Seeds(Callback):
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        torch.manual_seed(trainer.global_rank)


@pytest.mark.parametrize("shuffle", mostly_slow([False, True], True))
def test_batches_come_in_the_order_of_the_users_own_loader(shuffle: bool) -> None:
    one, both = (
        ended(Plain, made, lambda: DataLoader(pairs(), batch_size=8, shuffle=shuffle), callbacks=[Seeds()])[0]
        for made in (None, pipeline(num_microbatches=3))
    )
    assert_same(one, both, atol=1e-9)


class Mixed(Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        return pairs()[int(torch.randint(37, ()))]


class Noisy(Plain):
    """Its first stage draws noise and its last none; logs how far apart the ranks' batches are."""

    def __init__(self) -> None:
        super().__init__(nn.Dropout(0.5))

    def training_step(self, batch: Any) -> torch.Tensor:
        own = batch[0].sum().item()
        self.log("apart", abs(own - self.of_rank_one(own)))
        return super().training_step(batch)

    def of_rank_one(self, own: float) -> float:
        return self.trainer.strategy.broadcast(own, src=1)


@pytest.mark.filterwarnings("ignore:net.1. noise from torch's generator")
def test_what_layers_draw_does_not_part_the_ranks_batches(tmp_path: Path) -> None:
    logger = LinesLogger(tmp_path / "lines")
    mixed = DataLoader(Mixed(), batch_size=8)
    ended(Noisy, pipeline(num_microbatches=3), lambda: mixed, max_epochs=1, logger=logger, log_every_n_steps=1)
    assert logger.values("apart") == [0.0] * 8
