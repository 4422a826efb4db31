"""The pipeline under modules, data and trainers of others: the same as on one device, or refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, StochasticWeightAveraging
from torch import nn
from torch.multiprocessing import ProcessRaisedException
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

from apprentice.progress import quiet
from strategies import PipelineStrategy
from strategies.staging.residence import Residence
from tests.processes import launch
from tests.training import LinesLogger, assert_same, trainer, weights


class Plain(LightningModule):
    """Four layers; batches are pairs of tensors (b, 6) and (b,)."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 8), *layers, nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 3))

    def forward(self, x: torch.Tensor) -> Any:
        return self.net(x)

    def pipeline_stages(self) -> list[nn.Module]:
        return list(self.net)

    def pipeline_loss(self, output: Any, batch: Any) -> torch.Tensor:
        return F.cross_entropy(output, batch[1])

    def training_step(self, batch: Any) -> torch.Tensor:
        loss = self.pipeline_loss(self(batch[0]), batch)
        self.log("loss", loss)
        return loss

    def predict_step(self, batch: Any) -> Any:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def pairs(rows: int = 37) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(rows, 6, generator=generator).double(), torch.arange(rows) % 3)


def ended(
    make: Callable[[], LightningModule], strategy: Any = None, data: Any = None, devices: int = 2, **kwargs: Any
) -> tuple[dict[str, torch.Tensor], LightningModule]:
    options: dict[str, Any] = {"max_epochs": 3, "precision": "64-true"}
    module, made = make(), trainer(devices if strategy else 1, strategy=strategy or "auto", **options | kwargs)
    with quiet():
        made.fit(module, DataLoader(pairs(), batch_size=8) if data is None else data())
    return weights(module), module


def pipeline(**options: Any) -> PipelineStrategy:
    return PipelineStrategy(timeout=60, **options)


class Thaws(Callback):
    """Freezes a layer, or all but a layer, for an epoch."""

    def on_train_epoch_start(self, trainer: Trainer, module: Any) -> None:
        module.net[0].requires_grad_(trainer.current_epoch > 0)


@pytest.mark.parametrize("schedule", ["1F1B", "InterleavedZeroBubble"])
def test_a_stage_that_is_unfrozen_on_the_way_trains(schedule: Any) -> None:
    one, _ = ended(Plain, callbacks=[Thaws()])
    both, _ = ended(Plain, pipeline(schedule=schedule), callbacks=[Thaws()])
    assert_same(one, both, atol=1e-9)


def test_batches_come_in_the_order_of_the_users_own_loader() -> None:
    for shuffle in (False, True):
        torch.manual_seed(3)
        one, _ = ended(Plain, data=lambda: DataLoader(pairs(), batch_size=8, shuffle=shuffle))  # noqa: B023
        torch.manual_seed(3)
        both, _ = ended(Plain, pipeline(), data=lambda: DataLoader(pairs(), batch_size=8, shuffle=shuffle))  # noqa: B023
        assert_same(one, both, atol=1e-9)


class Mixed(Dataset):
    """Draws a sample at random, by torch's generator."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        return pairs()[int(torch.randint(37, ()))]


class Noisy(Plain):
    """Its first stage draws noise and its last none; says whether ranks have the same batch."""

    def __init__(self) -> None:
        super().__init__(nn.Dropout(0.5))

    def training_step(self, batch: Any) -> torch.Tensor:
        sums = self.trainer.strategy.broadcast(batch[0].sum().item()), batch[0].sum().item()
        if sums[0] != sums[1]:
            raise ValueError(f"ranks read other batches: {sums}")
        return super().training_step(batch)


@pytest.mark.filterwarnings("ignore:net.1. noise from torch's generator")
def test_what_layers_draw_does_not_part_the_ranks_batches() -> None:
    ended(Noisy, pipeline(num_microbatches=3), lambda: DataLoader(Mixed(), batch_size=8))


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


class Infinite(Plain):
    """Its first loss is infinite; those after it are not those of pipeline_loss."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch)
        return loss if batch_idx == 0 else 3 * loss

    def pipeline_loss(self, output: Any, batch: Any) -> torch.Tensor:
        loss = super().pipeline_loss(output, batch)
        return loss + (torch.inf if self.trainer.global_step == 0 else 0)


class Widths(Plain):
    """What goes to its last stage is as wide as the first row says."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(Cut(), nn.Tanh())


class Cut(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, : 1 + int(x[0, 0] > 0)]


class Hidden(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return x, x.expand(2, *x.shape)


class WithHidden(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.net.append(Hidden())

    def pipeline_loss(self, output: Any, batch: Any) -> torch.Tensor:
        return F.cross_entropy(output[0], batch[1])


class Hooked(Plain):
    def on_fit_start(self) -> None:
        for p in self.parameters():
            if not p.is_meta:
                p.register_hook(lambda gradient: gradient / 2)


class Functional(Plain):
    """Noise that no layer shows."""

    def __init__(self) -> None:
        super().__init__(Drops())


class Drops(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, 0.1, self.training)


class ByName(Plain):
    def training_step(self, batch: Any) -> torch.Tensor:
        return self.pipeline_loss(self(batch[0], mask=None), batch)

    def forward(self, x: torch.Tensor, mask: Any = None) -> Any:
        return self.net(x)


class Batches(Plain):
    """A bug before forward."""

    def training_step(self, batch: Any) -> torch.Tensor:
        return super().training_step([batch[0] @ torch.ones(5, 5), batch[1]])


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (Infinite, {}, "Infinite.pipeline_loss: expected the loss that training_step returns"),
        (WithHidden, {}, r"ends with Hidden: expected tensors with the batch's . rows first, got one of \(2, ., 3\)"),
        (Hooked, {}, r"expected parameters without hooks, .*; net..\.weight has one"),
        (Hooked, {"exact": 8}, r"expected parameters without hooks, .*; net..\.weight has one"),
        (Functional, {"exact": 8}, "exact 8: expected noise from apprentice.keyed in a pipeline, not torch's"),
        (ByName, {}, "ByName.forward: expected calls with tensors by position, .*; argument mask is a NoneType by"),
        (Batches, {}, "mat1 and mat2 shapes cannot be multiplied|expected m1 and m2"),
    ],
)
def test_what_would_give_other_numbers_ends_the_fit(make: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ProcessRaisedException, match=message):
        ended(make, pipeline(num_microbatches=None if options else 4, **options))


def test_micro_batches_of_an_evaluation_are_alike() -> None:
    module, made = Widths(), trainer(2, strategy=pipeline(), precision="64-true")
    with quiet(), pytest.raises(ProcessRaisedException, match=r"expected a stage to give .* for every micro-batch"):
        made.predict(module, DataLoader(pairs(), batch_size=37))


class Elsewhere(Plain):
    def pipeline_stages(self) -> list[nn.Module]:
        return [*self.net, nn.Dropout(0.5)]


class Function(Plain):
    def pipeline_stages(self) -> Any:
        return [*self.net, torch.relu]


class Forgets(Plain):
    """A function between the layers that is no stage's."""

    example_input_array = torch.ones(2, 6)

    def forward(self, x: torch.Tensor) -> Any:
        return self.net[1:](torch.relu(self.net[0](x)))


@pytest.mark.parametrize(
    ("make", "settings", "message"),
    [
        (Elsewhere, {}, "pipeline_stages: expected modules of Elsewhere itself; a Dropout is not"),
        (Function, {}, "expected modules from Function.pipeline_stages.., got a builtin_function_or_method"),
        (Forgets, {}, "Forgets.pipeline_stages: expected modules whose composition is forward; outputs differ"),
        (Plain, {"detect_anomaly": True}, "detect_anomaly True: expected False"),
        (Plain, {"callbacks": [StochasticWeightAveraging(0.1)]}, "callbacks StochasticWeightAveraging: expected none"),
    ],
)
def test_what_can_not_work_is_refused_before_ranks_start(make: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ended(make, pipeline(), **settings)


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
        super().__init__(Wrapped(), Wrapped())

    def training_step(self, batch: Any) -> torch.Tensor:
        return super().training_step(batch["a"])

    def pipeline_loss(self, output: Any, batch: Any) -> torch.Tensor:
        return super().pipeline_loss(output, batch["a"] if isinstance(batch, dict) else batch)


class Wrapped(nn.Module):
    def forward(self, x: Any) -> Any:
        return x["x"] if isinstance(x, dict) else {"x": x}


def test_layers_are_timed_as_they_are_trained() -> None:
    def loaders() -> Any:
        return {"a": DataLoader(pairs(), batch_size=8), "b": DataLoader(pairs(), batch_size=8)}

    one, _ = ended(TwoLoaders, data=loaders)
    both, _ = ended(TwoLoaders, pipeline(balance="time"), loaders)
    assert_same(one, both, atol=1e-9)


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
        assert run.wait(60) == 0, run.output
    assert (tmp_path / "error1").read_text() == """KeyError: "a bug of a stage's\""""
    assert (tmp_path / "error0").read_text().startswith("ConnectionError: rank 1 has gone")


def test_texts_of_a_batch_are_cut_with_its_rows() -> None:
    from strategies.shards import part

    x = torch.arange(4)
    assert part((x, ("a", "b", "c", "d"), ["e", "f"]), 1, 3)[1:] == (("b", "c"), ["e", "f"])
    (first, _), (third, _) = part(((x, x), (x, x), (x, x), (x, x)), 1, 3)[::2]  # four rows, four pairs
    assert first.tolist() == third.tolist() == [1, 2]


def test_a_state_under_other_names_is_refused() -> None:
    residence = Residence.__new__(Residence)
    residence._names, residence.owners = {}, {}
    residence.group = None
    with pytest.raises(ValueError, match="state_dict: expected parameters under their own names; renamed is none's"):
        residence.whole({"renamed": torch.empty(2, device="meta")})
