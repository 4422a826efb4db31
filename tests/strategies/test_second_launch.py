"""One Trainer, launched again and again: what it knows afterwards is what it would know in one process."""

import csv
import os
from collections.abc import Mapping
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.tuner import Tuner
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import strategies
from harness.runs.quiet import quiet
from strategies import DDP, FSDP, PipelineStrategy
from tests.grids import mostly_slow
from tests.training import assert_same, trainer, weights

pytestmark = pytest.mark.filterwarnings("ignore:Using `DistributedSampler`", "ignore:Checkpoint directory")
SAME = ("ddp_fork", "ddp_notebook", "ddp_spawn")  # ddp by other names
NAMES = [name for name in strategies.NAMES if name not in {*SAME, "tensor_parallel"}]  # which needs a net with a plan
LAUNCHED = [name for name in NAMES if name not in {"hsdp", "ddp_fp16"}]  # which test_crashes.py launches again
WHOLE = {"param_server", "pipeline", "model_parallel"}  # each rank that computes reads all rows
OTHERS = {"local_sgd", "ddp_fp16", "ddp_powersgd"}  # whose numbers are not those of one device


def loader(rows: int = 16) -> DataLoader:
    """Sixteen samples in float64, in a batch; `rows` are those of a rank."""
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(16, n, generator=generator, dtype=torch.float64) for n in (3, 1))
    return DataLoader(TensorDataset(x, y), batch_size=rows)


class Data(LightningDataModule):
    """Says in checkpoints how many batches a rank has had since the data were set up, by a counter made then."""

    def __init__(self, rows: int = 16) -> None:
        super().__init__()
        self.rows = rows

    def setup(self, stage: str) -> None:
        assert self.trainer is not None
        self.counter = [0]

    def train_dataloader(self) -> DataLoader:
        return loader(self.rows)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.counter[0] += 1
        return batch

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.counter[0]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.counter[0] = state_dict["batches"]


class Regression(LightningModule):
    """Anyone's module, which can be cut."""

    def __init__(self, lr: float = 0.01) -> None:
        super().__init__()
        self.lr = lr
        self.make()

    def make(self) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def pipeline_stages(self) -> list[nn.Module]:
        return list(self.net)

    def pipeline_loss(self, output: Tensor, batch: Any) -> Tensor:
        return F.mse_loss(output, batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.mse_loss(self(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", F.mse_loss(self(batch[0]), batch[1]), sync_dist=True, prog_bar=True)

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=self.lr)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def running(strategy: Strategy | None, folder: Path, **kwargs: Any) -> Trainer:
    callbacks: list[Callback] = [ModelCheckpoint(monitor="loss", save_top_k=2), EarlyStopping("loss", patience=9)]
    options = {"default_root_dir": folder, "callbacks": callbacks, "enable_checkpointing": True, "max_epochs": 3}
    options |= {"precision": "64-true", "strategy": strategy or "auto"}
    return trainer(2 if strategy else 1, **options | kwargs)


def plain(value: Any, folder: Path) -> Any:
    """A state in numbers and words, with paths below the folder; floats are rounded."""
    if isinstance(value, Mapping):
        return {plain(key, folder): plain(inner, folder) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner, folder) for inner in value]
    if isinstance(value, Tensor):
        return plain(value.tolist(), folder)
    if isinstance(value, float):
        return float(f"{value:.6g}")
    return value.replace(str(folder), "") if isinstance(value, str) else value


def known(of: Trainer, folder: Path) -> dict[str, Any]:
    assert of.checkpoint_callback
    found: dict[str, Any] = {"step": of.global_step, "epoch": of.current_epoch, "state": of.state.status}
    found |= {"metrics": [of.callback_metrics, of.logged_metrics, of.progress_bar_metrics]}
    of.save_checkpoint(folder / "by_hand.ckpt")
    saved = torch.load(folder / "by_hand.ckpt", weights_only=True)
    found |= {"saved": {key: value for key, value in saved.items() if key != "state_dict"}}
    found |= {"rates": [group["lr"] for optimizer in of.optimizers for group in optimizer.param_groups]}
    found |= {"schedulers": [config.scheduler.state_dict() for config in of.lr_scheduler_configs]}
    return plain(found, folder)


def chain(of: Trainer, rows: int, folder: Path) -> list[Any]:
    """Fit, validate, test, predict and fit on; what is known after each, and the weights."""
    module, data, found = Regression(), Data(rows), []
    with quiet():
        of.fit(module, data)
        found += [weights(module), known(of, folder)]
        found += [plain(of.validate(module, data, verbose=False), folder), data.state_dict()]
        found += [plain(of.test(module, data, ckpt_path="best", weights_only=True, verbose=False), folder)]
        of.predict(module, data, return_predictions=False)
        of.fit_loop.max_epochs = 4
        of.fit(module, data)
    return [*found, weights(module), known(of, folder)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = tmp_path_factory.mktemp("alone")
    return chain(running(None, folder), 16, folder)


@pytest.mark.parametrize("name", mostly_slow(LAUNCHED, "ddp_zero1", "fsdp", "pipeline", "param_server"))
def test_trainers_go_on_after_ranks(
    name: str, alone: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MASTER_PORT", raising=False)
    path, options = strategies.NAMES[name]
    here = running(resolve_name(path)(timeout=30, **options), tmp_path)
    found = chain(here, 16 if name in WHOLE else 8, tmp_path)
    assert "MASTER_PORT" not in os.environ
    if name in OTHERS:
        assert [found[i]["step"] for i in (1, -1)] == [3, 4]
        return
    for mine, theirs in zip(found, alone, strict=True):
        if isinstance(mine, dict) and "net.0.weight" in mine:
            assert_same(mine, theirs, atol=1e-9)
        else:
            assert mine == theirs


class SetUp(Regression):
    """Its layers are as many as the data say."""

    def make(self) -> None:
        self.net: nn.Sequential | None = None

    def setup(self, stage: str) -> None:
        if self.net is None:
            assert self.trainer.datamodule.columns == 3  # type: ignore[attr-defined]
            super().make()


class Columns(LightningDataModule):
    columns = 0

    def setup(self, stage: str) -> None:
        self.columns = 3

    def train_dataloader(self) -> DataLoader:
        return loader()

    val_dataloader = train_dataloader


# Those of `configure_model`: test_strangers.py
@pytest.mark.parametrize("strategy", mostly_slow([DDP, FSDP, PipelineStrategy], FSDP, PipelineStrategy))
def test_layers_that_ranks_have_made_are_trained(strategy: type[Strategy], tmp_path: Path) -> None:
    module, right = SetUp(), SetUp()
    with quiet():
        running(None, tmp_path / "alone").fit(right, Columns())
        here = running(strategy(timeout=30), tmp_path)
        here.fit(module, Columns())
        assert_same(weights(module), weights(right), atol=1e-9)
        (found,) = here.validate(module, Columns(), verbose=False)
    assert found["loss"] == pytest.approx(here.checkpoint_callback.best_model_score.item(), abs=1e-9)  # type: ignore[union-attr]
    assert here.optimizers[0].param_groups[0]["params"] == list(module.parameters())


class Grown(Regression):
    def on_train_start(self) -> None:
        self.late = nn.Linear(1, 1).requires_grad_(False)


class Counting(Regression):
    """Counts batches, and says so in its checkpoints; what else it counts is lost with the ranks."""

    seen = hidden = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen, self.hidden = self.seen + 1, self.hidden + 1
        return super().training_step(batch, batch_idx)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["seen"] = self.seen

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.seen = checkpoint["seen"]


def test_a_weight_without_a_place_is_named(tmp_path: Path) -> None:
    expected = "late.weight was trained in forked ranks, and Grown here has no such weight: expected layers"
    with quiet(), pytest.raises(ValueError, match=expected):
        running(DDP(timeout=30), tmp_path).fit(Grown(), Columns())


def test_what_a_module_saves_comes_back(tmp_path: Path) -> None:
    module = Counting()
    with quiet():
        running(DDP(timeout=30), tmp_path).fit(module, Columns())
    assert (module.seen, module.hidden, module.trainer.global_step) == (3, 0, 3)


class Described(Regression):
    def on_train_start(self) -> None:
        self.logger.log_hyperparams({"device": "cpu", "made_by": lambda: None})  # type: ignore[union-attr]


def points(folder: Path) -> list[Any]:
    found = []
    for path in folder.glob("events.*"):
        events = EventAccumulator(str(path), {"scalars": 0}).Reload()
        found += [(tag, x.step, f"{x.value:.5g}") for tag in events.Tags()["scalars"] for x in events.Scalars(tag)]
    return sorted(found)


def lines(folder: Path) -> list[Any]:
    rows = csv.DictReader((folder / "metrics.csv").read_text().splitlines())
    return [{key: value and f"{float(value):.6g}" for key, value in row.items()} for row in rows]


def logged(kind: type[CSVLogger | TensorBoardLogger], strategy: Strategy | None, folder: Path) -> list[Any]:
    """The folders of one Trainer, and what the logger's holds, after two fits, a test and lines of the script's own."""
    module, data, logger = Described(), Data(8 if strategy else 16), kind(folder)
    here = running(strategy, folder, logger=logger, log_every_n_steps=1, max_epochs=1)
    with quiet():
        logger.log_metrics({"before": 1.0}, 0)
        here.fit(module, data)
        assert (Path(logger.log_dir) / "checkpoints").is_dir()
        assert here.log_dir == logger.log_dir
        logger.log_metrics({"between": 1.0}, 1)
        here.test(module, data, verbose=False)
        here.fit_loop.max_epochs = 2
        here.fit(module, data)
    logger.finalize("success")
    at = Path(logger.log_dir)
    read = {CSVLogger: lines, TensorBoardLogger: points}[kind]
    return [sorted(p.relative_to(folder) for p in folder.rglob("*/")), read(at), (at / "hparams.yaml").read_text()]


@pytest.mark.parametrize("kind", [CSVLogger, TensorBoardLogger])
def test_all_launches_log_to_one_folder(kind: type[CSVLogger | TensorBoardLogger], tmp_path: Path) -> None:
    alone = logged(kind, None, tmp_path / "alone")
    assert logged(kind, DDP(timeout=30), tmp_path / "ranks") == alone


class Failing(Described):
    def on_test_start(self) -> None:
        assert self.logger
        self.logger.log_metrics({"fresh": 1.0}, 0)
        self.logger.save()
        raise RuntimeError("this test fails")


def test_a_launch_that_failed_costs_no_line(tmp_path: Path) -> None:
    def rows(strategy: Strategy | None, folder: Path) -> list[Any]:
        module, data = Failing(), Data(8 if strategy else 16)
        here = running(strategy, folder, logger=CSVLogger(folder), max_epochs=1)
        here.fit(module, data)
        with pytest.raises(Exception, match="this test fails"):
            here.test(module, data)
        here.fit_loop.max_epochs = 2
        here.fit(module, data)
        return lines(Path(here.log_dir or ""))

    with quiet():
        assert rows(DDP(timeout=30), tmp_path / "ranks") == rows(None, tmp_path / "alone")


def tuned(strategy: Strategy | None, folder: Path) -> list[float]:
    """The losses that the search has seen; the Trainer fits with the rate that it has found."""
    module = Regression(lr=0.5).double()
    before = weights(module)
    options: dict[str, Any] = {"callbacks": [], "enable_checkpointing": False, "max_epochs": 100}
    here = running(strategy, folder, use_distributed_sampler=False, **options)
    found = Tuner(here).lr_find(module, datamodule=Columns(), num_training=20)
    assert found is not None
    assert module.lr == found.suggestion() != 0.5
    assert (here.global_step, here.current_epoch) == (0, 0)
    assert_same(weights(module), before)
    here.fit_loop.max_epochs = 3
    here.fit(module, Columns())
    assert here.global_step == 3
    assert here.optimizers[0].param_groups[0]["initial_lr"] == module.lr
    return found.results["loss"]


@pytest.mark.parametrize("strategy", mostly_slow([DDP, FSDP, PipelineStrategy], FSDP))
def test_a_tuner_finds_the_rate_of_one_device(strategy: type[Strategy], tmp_path: Path) -> None:
    with quiet():
        assert tuned(strategy(timeout=30), tmp_path) == pytest.approx(tuned(None, tmp_path), abs=1e-9)


@pytest.mark.slow
def test_spawned_ranks_bring_back_the_same(alone: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_PORT", raising=False)
    module, data = Regression(), Data(8)
    with quiet():
        here = running(DDP(timeout=60, start_method="spawn"), tmp_path)
        here.fit(module, data)
        found = known(here, tmp_path)
    assert_same(weights(module), alone[0], atol=1e-9)
    assert found == alone[1]
