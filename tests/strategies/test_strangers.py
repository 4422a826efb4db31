"""Modules of other people's (`tests/strangers.py`) under each strategy: the numbers of one device, or a refusal."""

import json
import tempfile
import warnings
from collections.abc import Callable, Iterable
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.multiprocessing import ProcessRaisedException
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset, TensorDataset

from harness.runs.quiet import quiet
from lab.strategies import AllReduce, DDPPowerSGD, DDPRing, LocalSGD, ParamServer
from strategies import DDP, FSDP, HSDP, PipelineStrategy, ZeRO1
from tests import strangers
from tests.training import LinesLogger, trainer

BATCH = 12  # rows of a global batch


class Setup(NamedTuple):
    """A strategy, on so many devices."""

    make: Callable[..., Strategy | str]
    devices: int
    shares: int  # ranks that have rows of their own in training; 1: each reads whole batches

    def strategy(self, case: "Case") -> Strategy | str:
        kind = getattr(self.make, "func", None)
        told = case.find_unused_parameters and isinstance(kind, type) and issubclass(kind, DDP)
        return self.make(find_unused_parameters=True) if told else self.make()

    @property
    def rows(self) -> int:
        """What a user gives as `batch_size`."""
        return BATCH // self.shares

    def loader(self, data: Dataset, shuffle: bool = True) -> DataLoader:
        """A user's; where Lightning puts no DistributedSampler in, the batches are still those that it deals."""
        if shuffle and self.shares == 1:
            return DataLoader(data, self.rows, sampler=DistributedSampler(data, 1, 0))
        return DataLoader(data, self.rows, shuffle=shuffle)


def one_device() -> Setup:
    return Setup(lambda: "auto", 1, 1)


def setup(make: Callable[..., Strategy], devices: int, shares: int | None = None, **options: Any) -> Setup:
    return Setup(partial(make, timeout=60, **options), devices, shares or devices)


# Without ddp_fp16, whose gradients are rounded. ddp_powersgd sends them whole at first, as local_sgd does.
SETUPS = {
    "ddp": setup(DDP, 2),
    "ddp on 3": setup(DDP, 3),
    "ddp_zero1": setup(ZeRO1, 2),
    "ddp_ring": setup(DDPRing, 2),
    "ddp_allreduce": setup(AllReduce, 3),
    "local_sgd": setup(LocalSGD, 2, warmup_steps=1000),
    "ddp_powersgd": setup(DDPPowerSGD, 2, start_step=1000),
    "fsdp": setup(FSDP, 2),
    "hsdp": setup(HSDP, 2),
    "fsdp, whole": setup(FSDP, 2, reshard_after_forward=False),
    "fsdp on a mesh": setup(FSDP, 4, 2, mesh={"tensor": 2}),
    "pipelines": setup(PipelineStrategy, 4, 2, data_parallel_size=2),
    "param_server": setup(ParamServer, 3, 2),
    "pipeline": setup(PipelineStrategy, 2, 1),
    "model_parallel": setup(PipelineStrategy, 2, 1, schedule="GPipe", num_microbatches=1),
    "ddp exact": setup(DDP, 2, 1, exact=4),
    "ddp_zero1 exact": setup(ZeRO1, 3, 1, exact=4),
    "pipeline exact": setup(PipelineStrategy, 2, 1, exact=4),
}


class Outcome(NamedTuple):
    tensors: dict[str, Tensor]
    logged: list[dict[str, float]]  # a line for each call of the logger's
    facts: dict[str, Any]


Run = Callable[["Case", Setup, Path], Outcome]


class Case(NamedTuple):
    """A user's script."""

    make: Callable[[int], LightningModule]  # from the rows of a rank's batch
    loaders: Callable[[Setup], Any]
    options: Callable[[], dict[str, Any]] = dict
    run: Run | None = None
    find_unused_parameters: bool = False


def labelled(setup: Setup) -> dict[str, Any]:
    return {
        "train_dataloaders": setup.loader(strangers.points()),
        "val_dataloaders": setup.loader(strangers.points(24), False),
    }


def several(setup: Setup) -> dict[str, Any]:
    unlabelled = TensorDataset(strangers.points().tensors[0])
    train = {"labelled": setup.loader(Subset(strangers.points(), range(24))), "unlabelled": setup.loader(unlabelled)}
    val = [setup.loader(strangers.points(24), False), setup.loader(strangers.points(), False)]
    return {"train_dataloaders": CombinedLoader(train, "max_size_cycle"), "val_dataloaders": val}


def latents(setup: Setup) -> dict[str, Any]:
    return {"train_dataloaders": setup.loader(TensorDataset(strangers.points().tensors[0]))}


def tokens(setup: Setup) -> dict[str, Any]:
    return {"train_dataloaders": setup.loader(strangers.sentences())}


def made(case: Case, setup: Setup, folder: Path, **options: Any) -> tuple[Trainer, LightningModule]:
    torch.manual_seed(0)  # as `seed_everything` does
    module = case.make(setup.rows)
    found = {"precision": "64-true", "log_every_n_steps": 1, "strategy": setup.strategy(case)}
    found |= {"logger": LinesLogger(folder / "log"), "default_root_dir": folder} | case.options() | options
    return trainer(setup.devices, **found), module


def outcome(used: Trainer, module: LightningModule, **facts: Any) -> Outcome:
    path = used.logger.path
    logged = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return Outcome(module.state_dict(), logged, dict(used.callback_metrics) | facts)


def fitted(case: Case, setup: Setup, folder: Path) -> Outcome:
    used, module = made(case, setup, folder)
    used.fit(module, **case.loaders(setup))
    return outcome(used, module)


def fitted_and_more(case: Case, setup: Setup, folder: Path) -> Outcome:
    """By one Trainer, which then knows what it has done."""
    used, module = made(case, setup, folder)
    used.fit(module, **case.loaders(setup))
    steps = {"step": used.global_step, "epoch": used.current_epoch}
    used.validate(module, setup.loader(strangers.points(36), False), verbose=False)
    return outcome(used, module, **steps)


def validated(case: Case, setup: Setup, folder: Path) -> Outcome:
    used, module = made(case, setup, folder)
    used.validate(module, verbose=False)
    return outcome(used, module)


def resumed(case: Case, setup: Setup, folder: Path) -> Outcome:
    """Two epochs, and two more from the last checkpoint."""

    def fit(max_epochs: int, **kwargs: Any) -> tuple[Trainer, LightningModule]:
        saving = ModelCheckpoint(folder / "kept", "{epoch}-{step}", monitor="val_loss", save_top_k=2, save_last=True)
        options = {"enable_checkpointing": True, "callbacks": [saving], "max_epochs": max_epochs}
        used, module = made(case, setup, folder, **options)
        used.fit(module, **case.loaders(setup), **kwargs)
        return used, module

    fit(2)
    used, module = fit(4, ckpt_path=folder / "kept" / "last.ckpt", weights_only=True)
    best: Any = used.checkpoint_callback
    saved = torch.load(best.best_model_path, weights_only=True)
    tensors = {f"best {key}": value for key, value in saved["state_dict"].items()}
    for i, state in saved["optimizer_states"][0]["state"].items():
        tensors |= {f"{key} of {i}": x for key, x in state.items()}
    kept = sorted(path.name for path in (folder / "kept").iterdir())
    found = outcome(used, module, best=Path(best.best_model_path).name, best_score=best.best_model_score, kept=kept)
    return found._replace(tensors=found.tensors | tensors)


def predicted(case: Case, setup: Setup, folder: Path) -> Outcome:
    """29 rows, so that some rank has one row less."""
    data = strangers.points(29)
    used, module = made(case, setup, folder, callbacks=[strangers.Writer(folder, data.tensors[0])])
    used.predict(module, setup.loader(data, False), return_predictions=False)
    found = strangers.joined(folder, 1)
    return Outcome({"predictions": torch.stack([*found.values()])}, [], {"rows": [*found]})


def plain(make: Callable[[], LightningModule]) -> Callable[[int], LightningModule]:
    return lambda _rows: make()


def double(_rows: int) -> LightningModule:
    """On one device Lightning copies and loads weights before it makes them double."""
    return strangers.Classifier().double()


CASES = {
    "manual optimization": Case(plain(strangers.GAN), latents, find_unused_parameters=True),
    "several loaders": Case(plain(strangers.SemiSupervised), several),
    "a stream with workers": Case(strangers.Streamed, lambda _setup: {}),
    "unequal rows": Case(plain(strangers.Unequal), lambda _setup: {}, run=validated),
    "metrics": Case(plain(strangers.Measured), labelled),
    "EMA": Case(double, labelled, lambda: {"callbacks": [EMAWeightAveraging(decay=0.8)]}),
    "SWA": Case(double, labelled, lambda: {"callbacks": [StochasticWeightAveraging(0.01, 1)], "max_epochs": 3}),
    "top-k and resume": Case(double, labelled, run=resumed),
    "frozen layers": Case(plain(strangers.Backbone), labelled, lambda: {"callbacks": [strangers.Finetuning()]}),
    "tied weights": Case(plain(strangers.Tied), tokens),
    "a step's schedule": Case(
        plain(strangers.Scheduled), labelled, lambda: {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
    ),
    "predictions": Case(plain(strangers.Classifier), labelled, run=predicted),
    "configure_model": Case(plain(strangers.Late), labelled, run=fitted_and_more),
    "norms": Case(plain(strangers.Normed), labelled),
    "gathered outputs": Case(plain(strangers.Gathered), labelled),
    "gradient penalty": Case(plain(strangers.Penalized), labelled),
    "L1": Case(plain(strangers.Lasso), labelled),
    "a scalar": Case(plain(strangers.Tempered), labelled),
}

EXACT = ("ddp exact", "ddp_zero1 exact", "pipeline exact")
PIPELINES = ("pipeline", "model_parallel", "pipeline exact")
SHARDED = ("fsdp", "hsdp")


NORMS = "expected trainer.strategy.gradient_norm.* in place of grad_norm, as each rank has "
REFUSALS: list[tuple[Iterable[str], str, str]] = [
    (["param_server"], "manual optimization", "strategy param_server: expected automatic optimization of GAN"),
    (EXACT, "manual optimization", "exact 4: expected automatic optimization"),
    (PIPELINES, "manual optimization", "expected a module with pipeline_stages; GAN has none"),
    (PIPELINES, "several loaders", "SemiSupervised.training_step: expected one call of forward, got a second"),
    (["param_server"], "metrics", "expected a training_step that takes a batch without rows"),
    ([*PIPELINES, *SHARDED], "EMA", "callbacks EMAWeightAveraging: expected none that averages weights"),
    ([*PIPELINES, *SHARDED], "SWA", "callbacks StochasticWeightAveraging: expected none that averages"),
    (PIPELINES, "frozen layers", "callbacks Finetuning: expected none"),
    (SHARDED, "tied weights", "weight of Embedding can't be sharded: expected a parameter of one module"),
    (SHARDED, "norms", NORMS + "a"),
    (PIPELINES, "norms", NORMS + "the"),
    (EXACT, "gathered outputs", "expected a .* without collectives"),
    (SHARDED, "gradient penalty", "Penalized: expected reshard_after_forward False, as the loss uses gradients"),
    (PIPELINES, "gradient penalty", "Penalized.training_step: expected no gradient of forward's output"),
    (SHARDED, "L1", "Lasso: expected reshard_after_forward False and a loss that uses parameters"),
    (PIPELINES, "L1", "Lasso.training_step: expected a loss that uses no parameters"),
    (SHARDED, "a scalar", "net.5.temperature can't be sharded: expected a tensor of one number, not a scalar"),
    (PIPELINES, "tied weights", "a weight belongs to one stage; embedding.weight is in stages 0 and 1"),
]
REFUSED = {(case, name): message for names, case, message in REFUSALS for name in names}


@cache
def reference(case: str) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        return run(case, one_device(), Path(folder))


def run(case: str, setup: Setup, folder: Path) -> Outcome:
    with quiet():
        warnings.simplefilter("ignore", PossibleUserWarning)  # Lightning's advice
        warnings.filterwarnings("ignore", "Checkpoint directory .* exists and is not empty")
        return (CASES[case].run or fitted)(CASES[case], setup, folder)


def check(case: str, strategy: str, folder: Path) -> None:
    if (case, strategy) in REFUSED:
        with pytest.raises((ValueError, ProcessRaisedException), match=REFUSED[case, strategy]):
            run(case, SETUPS[strategy], folder)
    else:
        found, right = run(case, SETUPS[strategy], folder), reference(case)
        for name in Outcome._fields:
            assert_close(getattr(found, name), getattr(right, name), name)


def assert_close(found: Any, right: Any, where: str) -> None:
    if isinstance(right, dict):
        assert found.keys() == right.keys(), where
        for key, value in right.items():
            assert_close(found[key], value, f"{where}: {key}")
    elif isinstance(right, list):
        assert len(found) == len(right), where
        for i, value in enumerate(right):
            assert_close(found[i], value, f"{where}: {i}")
    elif isinstance(right, Tensor | float):
        torch.testing.assert_close(found, right, rtol=0, atol=1e-9, msg=lambda message: f"{where}: {message}")
    else:
        assert found == right, where


# Each case and each strategy once.
FIRST = {
    "ddp": ["frozen layers", "configure_model"],
    "ddp on 3": ["unequal rows"],
    "ddp_zero1": ["frozen layers"],
    "ddp_ring": ["manual optimization"],
    "ddp_allreduce": ["frozen layers"],
    "local_sgd": ["SWA"],
    "ddp_powersgd": ["manual optimization"],
    "fsdp": ["EMA", "norms", "gradient penalty", "L1", "a scalar"],
    "fsdp, whole": ["gradient penalty", "L1"],
    "fsdp on a mesh": ["gathered outputs"],
    "pipelines": ["gathered outputs"],
    "hsdp": ["tied weights"],
    "param_server": ["several loaders", "gathered outputs", "predictions"],
    "pipeline": ["metrics", "frozen layers", "norms", "L1"],
    "model_parallel": ["a step's schedule"],
    "ddp exact": ["top-k and resume", "manual optimization"],
    "ddp_zero1 exact": ["EMA"],
    "pipeline exact": ["a stream with workers"],
}


@pytest.mark.parametrize(("strategy", "case"), [(strategy, case) for strategy in FIRST for case in FIRST[strategy]])
def test_numbers_of_one_device(strategy: str, case: str, tmp_path: Path) -> None:
    check(case, strategy, tmp_path)


# Of strategies that are one in what a script can see, a case meets one, in turn.
KINDS = [
    ["ddp", "ddp_zero1", "ddp_ring", "ddp_allreduce", "local_sgd"], ["fsdp"], ["param_server"],
    ["pipeline", "pipeline exact"], ["ddp exact", "ddp_zero1 exact"],
]  # fmt: skip
OTHERS = [(case, kind[number % len(kind)]) for number, case in enumerate(CASES) for kind in KINDS]
OTHERS.remove(("norms", "param_server"))  # whose workers have no gradients


@pytest.mark.slow
@pytest.mark.parametrize(("case", "strategy"), [pair for pair in OTHERS if pair[0] not in FIRST[pair[1]]])
def test_every_case_under_every_kind_of_strategy(case: str, strategy: str, tmp_path: Path) -> None:
    check(case, strategy, tmp_path)
