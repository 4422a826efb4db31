"""Under `exact` the bits of a float32 run don't depend on the number of devices."""

import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.multiprocessing import ProcessRaisedException
from torch.nn import functional as F
from torch.utils._pytree import register_pytree_node
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from harness.runs.quiet import quiet
from lit_modules.objectives import CrossEntropy
from lit_modules.tasks import ExactMean
from strategies import DDP
from strategies.exact.shards import bounds, part
from strategies.exact.training import NotFiniteError
from tests.callbacks import Notes
from tests.grids import mostly_slow
from tests.lit_modules.test_distillation import Poisoned
from tests.training import MODULES, assert_same, digits, distil, distillation, fit, on, trainer, weights


class Stranger(LightningModule):
    """Anyone's module: torch's own dropout and BatchNorm, plain pairs, values logged in the usual ways."""

    def __init__(self, normalised: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        hidden = nn.Linear(64, 32), nn.BatchNorm1d(32) if normalised else nn.Tanh(), nn.ReLU(), nn.Dropout(0.3)
        self.net = nn.Sequential(nn.Flatten(), *hidden, nn.Linear(32, 10))
        self.accuracy, self.train_accuracy = MulticlassAccuracy(10), MulticlassAccuracy(10)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        images, labels = batch
        logits = self.net(images)
        loss = F.cross_entropy(logits, labels)
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log_dict({"norm": logits.norm(dim=1).mean(), "constant": 0.1})
        self.train_accuracy(logits, labels)
        self.log("train_acc", self.train_accuracy)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        images, labels = batch
        logits = self.net(images)
        self.accuracy(logits, labels)
        self.log("val_loss", F.cross_entropy(logits, labels), sync_dist=True)
        self.log("val_highest", logits.max(), reduce_fx="max")
        self.log("val_acc", self.accuracy)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)}


Bits = tuple[dict[str, torch.Tensor], bytes, list[Any]]


def bits(make: Callable[[], LightningModule], folder: Path, place: str, strategy: Any = None, **kwargs: Any) -> Bits:
    """Weights, the CSV log and the test's scores of a short run; `strategy`, if any, makes another."""
    logger = CSVLogger(folder, name="run", version=str(len(list(folder.glob("**/*.csv")))))
    module, data = make(), digits(validation_size=50, augment=True)  # batches of 37 and 27: shards of 3 to 5 rows

    def options() -> dict[str, Any]:
        return on(place) | ({"strategy": strategy()} if strategy else {}) | kwargs

    fit(module, data, logger=logger, log_every_n_steps=1, **options())
    with quiet():
        scores = trainer(**options()).test(module, data, verbose=False)
    return weights(module), (Path(logger.log_dir) / "metrics.csv").read_bytes(), scores


def assert_same_bits(one: Bits, other: Bits) -> None:
    assert_same(one[0], other[0])
    assert one[1:] == other[1:]


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[key], b[key]) for key in a)


@pytest.fixture(scope="module")
def on_one_process(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Bits]:
    return cache(lambda run: bits(MODULES[run], tmp_path_factory.mktemp(run), "ddp 1 exact 8"))


PLACES = [("students", 2), ("students", 3), ("students", 8), ("teacher", 3), ("resnet8", 2)]


@pytest.mark.parametrize(("run", "devices"), mostly_slow(PLACES, ("students", 3)))
def test_bits_are_equal_on_devices(
    run: str, devices: int, on_one_process: Callable[[str], Bits], tmp_path: Path
) -> None:
    assert len(on_one_process(run)[1].splitlines()) > 6
    assert_same_bits(on_one_process(run), bits(MODULES[run], tmp_path, f"ddp {devices} exact 8"))


@pytest.mark.slow
def test_without_it_they_are_not(tmp_path: Path) -> None:
    one, three = (bits(distillation, tmp_path, place) for place in ("ddp 1", "ddp 3"))
    assert not same(one[0], three[0])
    assert one[1] != three[1]


COMPOSED: dict[str, tuple[str, dict[str, Any]]] = {
    "zero1": ("ddp_zero1", {}),
    "half": ("ddp", {"precision": "bf16-mixed"}),
    "accumulated": ("ddp", {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1, "max_epochs": 3}),
}


@pytest.mark.parametrize("case", mostly_slow(COMPOSED, "zero1"))
def test_it_composes(case: str, on_one_process: Callable[[str], Bits], tmp_path: Path) -> None:
    name, options = COMPOSED[case]
    one, three = (bits(distillation, tmp_path, f"{name} {devices} exact 8", **options) for devices in (1, 3))
    assert_same_bits(one, three)
    assert same(on_one_process("students")[0], one[0]) == (case == "zero1")


def stranger(devices: int, folder: Path, samples: int = 101, **kwargs: Any) -> tuple[dict[str, torch.Tensor], bytes]:
    split = digits(train_size=samples).split("train")
    images, labels = split.inputs.float() / 16, split.labels
    train = DataLoader(TensorDataset(images, labels), batch_size=37, shuffle=True)
    val = DataLoader(TensorDataset(images[:90], labels[:90]), batch_size=30)
    logger = CSVLogger(folder, name="stranger", version=f"{devices}-{samples}")
    module = Stranger(normalised=True)
    with quiet(), warnings.catch_warnings(action="ignore"):  # Lightning's, about workers
        options = {"strategy": DDP(timeout=60, exact=8), "logger": logger, "log_every_n_steps": 1, "max_epochs": 3}
        trainer(devices, **options | kwargs).fit(module, train, val)
    return weights(module), (Path(logger.log_dir) / "metrics.csv").read_bytes()


@pytest.mark.parametrize(
    "samples", mostly_slow([101, 114], 114)
)  # 114: a last batch of 3 rows, fewer than there are shards
def test_anyones_module_can_be_exact(samples: int, tmp_path: Path) -> None:
    one = stranger(1, tmp_path, samples)
    assert one[1].startswith(b"constant,")
    for devices in (2, 5):
        other = stranger(devices, tmp_path, samples)
        assert_same(one[0], other[0])
        assert one[1] == other[1]


def known(trainer: Any, _module: Any) -> list[dict[str, str]]:
    metrics = trainer.logged_metrics, trainer.callback_metrics, trainer.progress_bar_metrics
    return [{name: float(value).hex() for name, value in sorted(found.items())} for found in metrics]


# Lightning brings them up to date after the hooks at a batch's and an epoch's end.
UPDATED = ("on_train_batch_start", "on_validation_end", "on_train_end", "on_test_end")


def test_logged_values_are_equal_on_all_ranks(tmp_path: Path) -> None:  # of anyone's: test_exact_logging.py
    told = Notes(tmp_path / "told", known, *UPDATED)
    bits(distillation, tmp_path, "ddp 3 exact 8", callbacks=[told])
    ranks = told.of_ranks()
    assert ranks == [ranks[0]] * 3
    names = {name for values in ranks[0] for found in values for name in found}
    assert {"hint/train/loss", "ce/val/acc", "ce/test/loss"} <= names


def test_a_shard_is_a_batch_of_its_own_to_the_module(tmp_path: Path) -> None:
    """One shard in all is plain training: the same gradients to the fixed point's resolution."""
    plain = fit(distillation(), digits(), precision="64-true")
    exact = fit(distillation(), digits(), precision="64-true", strategy=DDP(exact=1))
    assert_same(weights(plain), weights(exact), atol=1e-9)


@pytest.mark.parametrize("devices", [1, 3])
def test_a_student_that_fails_is_frozen_alone(devices: int) -> None:
    # calls: 4 shards a step, 3 the last
    module = distil({"bad": Poisoned(16), "ce": CrossEntropy()})
    fit(module, digits(), devices, strategy=DDP(timeout=60, exact=8), max_epochs=4)
    alone = fit(distillation(["ce"]), digits(), strategy=DDP(exact=8), max_epochs=4)
    ended = {k: v for k, v in weights(module).items() if k.startswith("students.ce")}
    assert_same(ended, {k: v for k, v in weights(alone).items() if k.startswith("students.ce")})
    assert all(v.isfinite().all() for v in weights(module).values())
    if devices == 1:
        assert module.failed == {"bad": {"step": 4, "term": "poisoned"}}


class Steep(LightningModule):
    def __init__(self, slope: float) -> None:
        super().__init__()
        self.fine, self.steep = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))
        self.slope = slope

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.fine.sum() + (self.steep * self.slope).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-9)


@pytest.mark.parametrize(("slope", "stops"), [(1e3, False), (3e38, False), (float("inf"), True)])
def test_a_gradient_stops_the_run_only_if_it_is_not_finite(slope: float, stops: bool) -> None:
    module = Steep(slope)
    if stops:
        with pytest.raises(OverflowError, match="exact 8: expected finite gradients; that of steep is not"):
            fit(module, digits(), strategy=DDP(exact=8))
        assert torch.equal(module.steep, torch.ones(2))
    else:
        fit(module, digits(), strategy=DDP(exact=8), max_epochs=1, limit_val_batches=0)
        torch.testing.assert_close(module.steep.detach(), torch.full((2,), 1 - 3 * slope * 1e-9))


def test_in_ranks_too_it_is_an_overflow_and_bad_input() -> None:
    with pytest.raises(ProcessRaisedException) as raised:
        fit(Steep(float("inf")), digits(), 2, strategy=DDP(exact=8))
    fault = raised.value.__cause__
    assert isinstance(fault, NotFiniteError)
    assert (fault.argument, fault.value, isinstance(fault, OverflowError)) == ("exact", "8", True)


class Nameless:
    """A batch that torch can take apart, but whose parts it has no names for."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self.tensors = tensors


register_pytree_node(Nameless, lambda batch: (list(batch.tensors), None), lambda tensors, _: Nameless(*tensors))


def test_cuts_depend_on_sizes_alone() -> None:
    assert bounds(37, 8) == [0, 5, 10, 15, 20, 25, 29, 33, 37]
    assert bounds(3, 8) == [0, 1, 2, 3, 3, 3, 3, 3, 3]
    batch = {"x": torch.arange(6).view(3, 2), "text": ["a", "b", "c"], "n": torch.tensor(3), "same": "all"}
    cut = part(batch, 1, 3)
    assert (cut["x"].tolist(), cut["text"], cut["n"], cut["same"]) == ([[2, 3], [4, 5]], ["b", "c"], 3, "all")
    x = torch.arange(4)
    assert part((x, ("a", "b", "c", "d"), ["e", "f"]), 1, 3)[1:] == (("b", "c"), ["e", "f"])
    (first, _), (third, _) = part(((x, x), (x, x), (x, x), (x, x)), 1, 3)[::2]  # four rows, four pairs
    assert first.tolist() == third.tolist() == [1, 2]
    with pytest.raises(ValueError, match=r"one number of rows; batch\[0\] has 3, batch\[1\]\['mask'\] has 4$"):
        part((torch.zeros(3), {"x": torch.zeros(3), "mask": torch.zeros(4), "n": torch.tensor(5)}), 0, 1)
    with pytest.raises(ValueError, match=r"one number of rows; batch has 3, batch has 4$"):
        part([Nameless(torch.zeros(3), torch.zeros(4))], 0, 1)
    with pytest.raises(ValueError, match="one number of rows; there is none"):
        part({"n": torch.tensor(5)}, 0, 1)


class Normed(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return F.cross_entropy(self.net(batch[0].to(self.dtype)), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def normed(
    rows: int, size: int, make: Callable[[], LightningModule] = Normed, **options: Any
) -> dict[str, torch.Tensor]:
    split = digits(train_size=rows).split("train")
    data = DataLoader(TensorDataset(split.inputs.float() / 16, split.labels), batch_size=size)
    module = make()
    with quiet(), warnings.catch_warnings(action="ignore"):  # Lightning's, about workers
        trainer(use_distributed_sampler=False, **options).fit(module, data)
    return weights(module)


def test_batch_norm_gets_eight_rows_or_the_whole_batch() -> None:
    def double(rows: int, size: int, exact: int | None) -> dict[str, torch.Tensor]:
        strategy = "auto" if exact is None else DDP(exact=exact)
        return normed(rows, size, strategy=strategy, precision="64-true")

    assert_same(double(28, 15, None), double(28, 15, 128), atol=1e-9)  # of 15 rows and of 13: one shard
    assert_same(double(84, 32, 4), double(84, 32, 128), atol=1e-9)  # of 32 rows four, of 20 two
    assert (double(28, 15, None)["net.1.weight"] - Normed().net[1].weight).abs().max() > 0.01  # type: ignore[union-attr]


def test_fewer_shards_than_devices_have_the_same_bits() -> None:
    one = normed(53, 20, **on("ddp 1 exact 5"))  # two shards, and one
    for devices in (3, 5):
        assert_same(one, normed(53, 20, **on(f"ddp {devices} exact 5")))


class Sparse(Normed):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Embedding(10, 10, sparse=True))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return F.cross_entropy(self.net(batch[1]), batch[1])


def changing(
    step: Callable[[Any, int], Any] = lambda *_: None, first: Callable[[Any], Any] = lambda _: None
) -> Callable[[], LightningModule]:
    """Makes a `Normed` that is changed once it is made, and again in each step."""

    class Changing(Normed):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            step(self, batch_idx)
            return super().training_step(batch, batch_idx)

    def make() -> LightningModule:
        module = Changing()
        first(module)
        return module

    return make


def test_a_module_that_is_frozen_as_a_whole_is_torchs_to_refuse() -> None:
    for strategy in ("auto", DDP(exact=8)):
        with pytest.raises(RuntimeError, match="element 0 of tensors does not require grad"):
            normed(16, 16, make=changing(first=lambda m: m.requires_grad_(False)), strategy=strategy)


COUNTING = changing(lambda m, _: m.seen.add_(1), lambda m: m.register_buffer("seen", torch.zeros(())))
MANUAL = changing(first=lambda m: setattr(m, "automatic_optimization", False))
PHASE = nn.Parameter(torch.ones(10, dtype=torch.complex64))
COMPLEX = changing(first=lambda m: m.register_parameter("phase", PHASE))
ALTERNATING = changing(lambda m, batch_idx: m.net[1].requires_grad_(batch_idx % 2 == 0))
UNFREEZING = changing(lambda m, _: m.net.requires_grad_(True), lambda m: m.net[1].requires_grad_(False))
TRAINS = r"expected a training_step that freezes, unfreezes and replaces no parameter, .* so with net\.1\.weight"
ONE_ROW = "exact 8: expected batches of two rows or more for BatchNorm; shard 0 of 8 has 1 of the batch's 1"
REFUSED: dict[str, tuple[Callable[[], LightningModule], str, int, str]] = {  # with rows in batches of 16
    "a count": (COUNTING, "ddp 1 exact 8", 32, "seen has changed"),
    "manual": (MANUAL, "ddp 1 exact 8", 16, "automatic optimization"),
    "sparse": (Sparse, "ddp 1 exact 8", 16, r"exact 8: expected dense gradients; that of net.0.weight is sparse"),
    "complex": (COMPLEX, "ddp 1 exact 8", 16, r"exact 8: expected real parameters; phase is complex"),
    "one row": (Normed, "ddp 1 exact 8", 17, ONE_ROW),
    "one row of two ranks": (Normed, "ddp 2 exact 8", 17, ONE_ROW),
    "alternating": (ALTERNATING, "ddp 1 exact 2", 64, TRAINS),
    "unfreezing": (UNFREEZING, "ddp 1 exact 2", 64, TRAINS),
    "unfreezing on two ranks": (UNFREEZING, "ddp 2 exact 2", 64, TRAINS),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_can_not_be_exact_is_refused(case: str) -> None:
    make, place, rows, message = REFUSED[case]
    with pytest.raises(Exception, match=message):
        normed(rows, 16, make=make, **on(place))


def test_an_exact_mean_has_no_order_and_hides_nothing() -> None:
    values, means = torch.rand(1000).mul(100), []
    for pieces in (values.split(7), values.flip(0).split(13)):
        mean = ExactMean()
        for piece in pieces:
            mean.update(piece)
        means.append(mean.compute())
    assert means[0] == means[1]
    assert means[0].item() == pytest.approx(values.double().mean().item(), abs=1e-9)
    mean.update(torch.tensor([torch.inf]))
    assert mean.compute().isnan()
