"""Other people's data modules: the same numbers on any devices, with any workers, after any resume."""

import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningDataModule
from PIL import Image
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    random_split,
)

from apprentice.batch import Batch
from apprentice.errors import BadInput
from apprentice.keyed import with_seed
from datamodules.adapter import DataModuleAdapter
from experiments import hardware, kd
from lit_modules.classifier import LitClassifier
from lit_modules.nets import LightNN
from strategies import DDP
from tests.callbacks import Saver
from tests.commands import refused, results
from tests.grids import mostly_slow
from tests.training import assert_same, fit, trainer, weights


class Images(Dataset):
    """103 images of noise, each seen with other noise whenever it is read."""

    def __len__(self) -> int:
        return 103

    def __getitem__(self, place: int) -> tuple[Tensor, int]:
        image = torch.rand(1, 8, 8, generator=torch.Generator().manual_seed(place)) + 0.1 * torch.randn(1, 8, 8)
        return image + float(np.random.standard_normal()), place % 3  # noqa: NPY002 - as others do


class Mine(LightningDataModule):
    """A data module as Lightning's guide has one: split in `setup`, loaders as torch makes them, a hook of its own."""

    def __init__(self, workers: int = 0, sampler: str = "shuffle", drop_last: bool = False) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.num_classes = 3
        self.calls: list[str] = []

    def prepare_data(self) -> None:
        self.calls.append("prepare")

    def setup(self, stage: str) -> None:
        self.calls.append(stage)
        if stage == "fit":
            halves = random_split(Images(), [83, 20], generator=torch.Generator().manual_seed(42))
            self.train, self.val = halves
        if stage == "test":
            places = torch.arange(50)
            self.test = TensorDataset(torch.arange(50.0)[:, None, None, None].expand(50, 1, 8, 8) / 50, places % 3)

    def train_dataloader(self) -> Any:
        options: dict[str, Any] = {"num_workers": self.hparams["workers"], "drop_last": self.hparams["drop_last"]}
        if self.hparams["sampler"] == "weighted":
            options["sampler"] = WeightedRandomSampler(torch.arange(83.0).tolist(), 60)
        else:
            options["shuffle"] = True
        if self.hparams["sampler"] == "own generator":
            options["generator"] = torch.Generator().manual_seed(1)
        return DataLoader(self.train, batch_size=16, **options)

    def val_dataloader(self) -> Any:
        return DataLoader(self.val, batch_size=16)

    def test_dataloader(self) -> Any:
        return DataLoader(self.test, batch_size=10)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        inputs, labels = batch
        return 2 * inputs - 1, labels


class Batches:
    def __init__(self, count: int, size: int = 16) -> None:
        self.count, self.size = count, size

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        drawn = torch.Generator().manual_seed(0)
        for number in range(self.count):
            size = self.size - 3 * (number == self.count - 1)
            yield torch.rand(size, 1, 8, 8, generator=drawn), torch.randint(3, (size,), generator=drawn)


class Plain(Mine):
    def train_dataloader(self) -> Any:
        return Batches(5)

    val_dataloader = test_dataloader = train_dataloader


def module() -> LitClassifier:
    return LitClassifier(with_seed(0, lambda: LightNN(input_shape=(1, 8, 8), num_classes=3)), num_classes=3)


def ended(data: LightningDataModule, devices: int = 1, **options: Any) -> dict[str, Tensor]:
    adapted = DataModuleAdapter(data)
    adapted.setup()
    return weights(fit(module(), adapted, devices, **options))


def seen(data: LightningDataModule, part: str = "train", rank: int = 0, replicas: int = 1) -> list[Batch]:
    adapted = DataModuleAdapter(data)
    adapted.setup()
    adapted._rank_and_replicas = lambda: (rank, replicas)  # type: ignore[method-assign]
    return list(getattr(adapted, f"{part}_dataloader")())


KINDS: dict[str, Callable[[], Mine]] = {
    "plain": Plain,
    "indexed": Mine,
    "drop_last": lambda: Mine(drop_last=True),
    "weighted": lambda: Mine(sampler="weighted"),
}


@cache
def ended_alone(kind: str) -> dict[str, Tensor]:
    return ended(KINDS[kind](), precision="64-true")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("devices", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_several_processes_end_as_one(kind: str, devices: int) -> None:
    assert_same(ended(KINDS[kind](), devices, precision="64-true"), ended_alone(kind), atol=1e-9)


def test_workers_and_a_generator_of_its_own_move_nothing() -> None:
    expected = ended(Mine())
    assert_same(ended(Mine(workers=2)), expected)
    assert_same(ended(Mine(sampler="own generator")), ended(Mine(sampler="own generator")))


@pytest.mark.parametrize("make", mostly_slow([Mine, Plain], Mine))
def test_exact_bits_on_two_processes(make: Callable[[], Mine]) -> None:
    one, two = (ended(make(), devices, strategy=DDP(timeout=60, exact=4)) for devices in (1, 2))
    assert_same(one, two)


@pytest.mark.parametrize("make", [lambda: Mine(workers=1), lambda: Mine(sampler="own generator"), Plain])
def test_resumed_in_mid_epoch_it_ends_the_same(make: Callable[[], Mine], tmp_path: Path) -> None:
    whole = ended(make(), callbacks=[Saver(tmp_path, "on_train_batch_end")])
    for step in (2, 5, 7):
        resumed, data = module(), DataModuleAdapter(make())
        trainer().fit(resumed, data, ckpt_path=tmp_path / f"{step}.ckpt")
        assert_same(weights(resumed), whole)


def test_each_epoch_and_seed_has_its_own_order_and_noise() -> None:
    data = DataModuleAdapter(Mine())
    data.setup()
    loader = data.train_dataloader()
    passes = []
    for epoch, seed in ((0, 0), (0, 0), (1, 0), (0, 1)):
        loader.sampler.epoch, loader.sampler.seed = epoch, seed
        passes.append(torch.cat([batch.index for batch in loader]))
        assert passes[-1].sort().values.equal(torch.arange(83))
    assert passes[0].equal(passes[1])
    assert not any(passes[0].equal(other) for other in passes[2:])
    first = dict(zip(passes[0].tolist(), torch.cat([batch.inputs for batch in loader]), strict=True))
    loader.sampler.seed = 0
    again = dict(zip(passes[0].tolist(), torch.cat([batch.inputs for batch in loader]), strict=True))
    assert not any(first[place].equal(again[place]) for place in first)


@pytest.mark.parametrize("make", [Mine, Plain])
@pytest.mark.parametrize("replicas", mostly_slow([2, 3, 40], 3, 40))
def test_ranks_share_each_training_batch_and_evaluate_each_sample_once(make: Callable[[], Mine], replicas: int) -> None:
    if replicas <= 16:
        ranks = [seen(make(), "train", rank, replicas) for rank in range(replicas)]
        for whole, *parts in zip(seen(make()), *ranks, strict=True):
            assert torch.cat([part.inputs for part in parts]).equal(whole.inputs)
            assert torch.cat([part.index for part in parts]).equal(whole.index)
            assert {part.count for part in parts} == {len(whole.labels)}
    for part in ("val", "test"):
        alone, dealt = seen(make(), part), [seen(make(), part, rank, replicas) for rank in range(replicas)]
        assert len({len(batches) for batches in dealt}) == 1
        found = [batch for turn in zip(*dealt, strict=True) for batch in turn]
        for key in ("inputs", "labels", "index"):
            one, several = (torch.cat([getattr(batch, key) for batch in each]) for each in (alone, found))
            assert one.equal(several)


def test_its_hooks_run_and_batches_are_tested_once_under_a_limit() -> None:
    mine = Mine()
    data = DataModuleAdapter(mine)
    scores = trainer(limit_test_batches=2).test(module(), data, verbose=False)
    assert scores
    assert data.sizes == {"train": 83, "validation": 20, "test": 50}
    assert mine.calls == ["prepare", "fit", "test"]
    for limit, samples in ((2, 20), (0.5, 20), (1.0, 50)):
        tester, net = trainer(limit_test_batches=limit), module()
        assert data.used(tester)["test"] == samples
        tester.test(net, data, verbose=False)
        assert int(net.scores_of("").confusion.compute().sum()) == samples
    images = data.samples("test", torch.tensor([3, 0])).inputs
    assert images[:, 0, 0, 0].tolist() == pytest.approx([2 * 3 / 50 - 1, -1])
    train = data.samples("train", torch.arange(4))
    assert train.inputs.shape == (4, 1, 8, 8)
    assert train.inputs.equal(data.samples("train", torch.arange(20)).inputs[:4])


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        return iter([(torch.zeros(1, 8, 8), 0)] * 20)


def of(loader: Any, **attributes: Any) -> Mine:
    data = Mine()
    for name, value in {"train_dataloader": lambda: loader, **attributes}.items():
        setattr(data, name, value)
    return data


def pairs(inputs: Any, labels: Any) -> DataLoader:
    return DataLoader(TensorDataset(inputs, labels), batch_size=4)


def samples(*values: tuple[Any, Any], batch_size: int = 4, **options: Any) -> DataLoader:
    return DataLoader(values, batch_size=batch_size, **options)  # type: ignore[arg-type]


def named(*names: str) -> DataLoader:
    data = TensorDataset(*USUAL)
    data.classes = list(names)  # type: ignore[attr-defined]
    return DataLoader(Subset(data, range(8)), batch_size=4)


USUAL = torch.zeros(8, 1, 8, 8), torch.arange(8) % 3
IMAGE, LARGER, BOXES = torch.zeros(1, 8, 8), torch.zeros(1, 8, 9), {"boxes": torch.zeros(2, 4)}
MORE_BOXES = {"boxes": torch.zeros(3, 4)}
JOINED = "samples that can be joined, of one size; they can't: stack"
A_CLASS = "labels (n,) of whole numbers, a class for each sample"


BAD: dict[str, tuple[Any, str]] = {
    "classes": (
        of(pairs(*USUAL), num_classes=None),
        "num_classes None: expected the number of classes, at least 2; Mine",
    ),
    "labels": (
        of(pairs(*USUAL), num_classes=2),
        "num_classes 2: expected labels from 0 to 1; the first batch has 0 to 2",
    ),
    "two": (of([pairs(*USUAL)] * 2), "data Mine: expected one loader from train_dataloader(); it gives list"),
    "length": (of(DataLoader(Stream())), "data Mine: expected a loader with a length from train_dataloader()"),
    "floats": (
        of(pairs(USUAL[0], torch.zeros(8))),
        "data (4, 1, 8, 8) torch.float32, (4,) torch.float32: expected batches",
    ),
    "dict": (of(DataLoader(Images(), collate_fn=lambda _: {"x": 1})), "data dict: expected batches of two tensors"),
    "sampler": (
        of(DataLoader(Images(), sampler=DistributedSampler(Images(), 2, 0))),
        "data Mine: expected a loader without a DistributedSampler from train_dataloader()",
    ),
    "none": (LightningDataModule(), "data LightningDataModule: expected a data module with train_dataloader()"),
    "logit": (
        of(pairs(*USUAL), num_classes=1),
        "num_classes 1: expected the number of classes, at least 2, each with a",
    ),
    "sizes": (of(samples((IMAGE, 0), (LARGER, 1))), f"{JOINED} expects"),
    "worker": (
        of(samples((IMAGE, 0), (LARGER, 1), num_workers=1)),
        "they can't: stack expects each tensor to be equal size",
    ),
    "boxes": (of(samples((IMAGE, BOXES), (IMAGE, MORE_BOXES))), JOINED),
    "box": (of(samples((IMAGE, BOXES))), A_CLASS),
    "map": (of(samples((IMAGE, IMAGE))), A_CLASS),
    "several": (of(samples((IMAGE, torch.tensor([0, 1])))), A_CLASS),
    "regression": (of(samples((IMAGE, 0.5))), A_CLASS),
    "picture": (of(samples((Image.new("L", (8, 8)), 0))), "they can't: default_collate: batch must contain tensors"),
    "uint8": (
        of(samples((IMAGE.byte(), 0))),
        "images of floats, as ToTensor makes them; train_dataloader() gives uint8",
    ),
    "dropped": (
        of(samples((IMAGE, 0), drop_last=True)),
        "data Mine: expected a batch or more from train_dataloader()",
    ),
    "validation": (
        of(samples((LARGER, 0))),
        "first batch of val_dataloader() has (1, 8, 8), and the first of training (1, 8, 9)",
    ),
    "names": (
        of(named(*"abc"), test_dataloader=lambda: named(*"bac")),
        "data sets with the same classes in the same order; test has b, a, c and train a, b, c",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_can_not_be_used_is_refused(case: str) -> None:
    data, message = BAD[case]
    with pytest.raises(BadInput, match=re.escape(message)) as error:
        DataModuleAdapter(data).setup()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("late", "message"),
    [
        ((IMAGE, 3), "num_classes 3: expected labels from 0 to 2; a batch has 3 to 3"),
        ((IMAGE, -100), "num_classes 3: expected labels from 0 to 2; a batch has -100 to -100"),
        ((LARGER, 0), "data Mine: expected images of one size; a batch has (1, 8, 9), and the first of training"),
    ],
    ids=["above", "below", "size"],
)
@pytest.mark.parametrize("part", ["train", "val", "test"])
def test_a_later_batch_that_can_not_be_used_is_refused(part: str, late: Any, message: str) -> None:
    data = of(samples((IMAGE, 0), (IMAGE, 1), batch_size=1), val_dataloader=lambda: samples((IMAGE, 0)))
    setattr(data, f"{part}_dataloader", lambda: samples((IMAGE, 0), late, batch_size=1))
    runner, module = trainer(max_epochs=1), LitClassifier(LightNN((1, 8, 8), 3), 3)
    with pytest.raises(BadInput, match=f"^{re.escape(message)}"):
        runner.test(module, DataModuleAdapter(data), verbose=False) if part == "test" else runner.fit(
            module, DataModuleAdapter(data)
        )


def test_what_does_not_hold_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    class NoTest(LightningDataModule):
        def train_dataloader(self) -> Any:
            return Batches(3)

        def val_dataloader(self) -> Any:
            return pairs(*USUAL)

    data = DataModuleAdapter(NoTest(), num_classes=3)
    assert data.sizes == {"train": 48, "validation": 0, "test": 8}
    told = capsys.readouterr().err.splitlines()
    assert told[0] == "NoTest: it has no test_dataloader(): tests on val_dataloader(), validates on nothing"
    assert told[1].startswith("NoTest: train_dataloader() gives no DataLoader of an indexed data set, so each device")


class NoValidation(LightningDataModule):
    num_classes = 3

    def train_dataloader(self) -> Any:
        return pairs(torch.rand(40, 1, 8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 3)

    def test_dataloader(self) -> Any:
        return pairs(*USUAL)


class NoTest(NoValidation):
    val_dataloader = NoValidation.test_dataloader
    test_dataloader = LightningDataModule.test_dataloader


@pytest.mark.parametrize("kind", mostly_slow([NoValidation, NoTest], NoTest))
def test_the_studies_take_one_that_lacks_a_loader(kind: type, tmp_path: Path) -> None:
    data = ["--data", f"{__name__}.{kind.__name__}"]
    kd.main([*data, "--teacher", "LightNN", "--only", "ce", "kd", "--trainer.max_epochs", "1", "--seeds", "1",
             "--out", str(tmp_path / "kd")])  # fmt: skip
    assert results(tmp_path / "kd")["data"] == {"name": kind.__name__, "train": 40, "validation": 0, "test": 8}
    one_step = ["--net", "LightNN", "--only", "ddp", "--steps", "1"]
    hardware.main([*data, *one_step, "--out", str(tmp_path / "hardware")])


def test_the_study_takes_it_by_its_import_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--data", f"{__name__}.Mine", "--teacher", "LightNN", "--only", "ce", "hint", "--trainer.max_epochs", "2"]
    kd.main([*flags, "--seeds", "1", "--out", str(tmp_path / "run")])
    found = results(tmp_path / "run")
    assert found["data"] == {"name": "Mine", "train": 83, "validation": 20, "test": 50}
    assert set(found["students"]) == {"ce", "hint"}
    kd.main(["--resume", "true", "--out", str(tmp_path / "run")])
    flags = ["--data", f"{__name__}.Images"]
    refused(kd.main, flags, f"--data {__name__}.Images: expected a class derived from", "", tmp_path, capsys)
