"""A pipeline trains, evaluates, logs and checkpoints as one device does."""

import functools
import itertools
import json
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.multiprocessing import ProcessRaisedException
from torch.nn import functional as F
from torchmetrics.classification import MulticlassAccuracy

from apprentice.keyed import Dropout, seeded
from apprentice.progress import quiet
from datamodules import Shakespeare
from lit_modules.classifier import LitClassifier
from lit_modules.distillation import Distillation
from lit_modules.nets import DeepNN, ResNet, RNNClassifier, Torchvision
from lit_modules.objectives import CrossEntropy
from strategies import DDP, PipelineStrategy
from strategies.staging import stages
from strategies.staging.parcels import Layout, Packing
from tests.processes import launch
from tests.training import SHAPE, assert_same, classifier, digits, distillation, fit, net, trainer, weights

Make = Callable[[], LightningModule]
SCHEDULES = ["GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]
# Devices, and what makes of them 2, 3 and 4 stages in a row, and two pipelines of two stages side by side.
SHAPES: dict[str, tuple[int, dict[str, Any]]] = {
    "2": (2, {"schedule": "GPipe"}),
    "3": (3, {"schedule": "1F1B"}),
    "4": (2, {"schedule": "InterleavedZeroBubble"}),
    "2x2": (4, {"schedule": "1F1B", "data_parallel_size": 2}),
}
MODULES: dict[str, Make] = {
    "teacher": lambda: classifier(DeepNN),
    "students": distillation,
    "resnet8": lambda: classifier(ResNet, depth=8, norm="group"),
    "resnet50": lambda: classifier(Torchvision, name="resnet50", norm="group"),
}


def pipeline(**options: Any) -> PipelineStrategy:
    return PipelineStrategy(timeout=60, **options)


def fitted(make: Make, devices: int = 1, strategy: Any = None, **kwargs: Any) -> LightningModule:
    """A module after a short fit; batches of 37, the last of 27."""
    data = kwargs.pop("data", {})
    return fit(make(), digits(**data), devices, strategy=strategy or DDP(timeout=60), **kwargs)


def settings(name: str) -> dict[str, Any]:
    small = {"data": {"train_size": 21, "batch_size": 8}} if name == "resnet50" else {}
    return {"precision": "64-true", "max_epochs": 7, "max_steps": 20, **small}


@functools.cache
def on_one_process(name: str) -> LightningModule:
    return fitted(MODULES[name], **settings(name))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", MODULES)
def test_twenty_steps_end_where_one_process_does(name: str, shape: str) -> None:
    devices, options = SHAPES[shape]
    module = fitted(MODULES[name], devices, pipeline(**options), **settings(name))
    assert_same(weights(on_one_process(name)), weights(module), atol=1e-9)
    assert list(module.state_dict()) == list(on_one_process(name).state_dict())


@pytest.mark.real_data
@pytest.mark.parametrize("exact", [None, 8])
def test_a_text_classifier_on_two_pipelines_of_two(exact: int | None, data_root: Path) -> None:
    """The hybrid of PyTorch's RPC tutorials with today's parts: embedding | GRU, head, gradients averaged over two."""

    def ended(devices: int, strategy: Any) -> LightningModule:
        data = Shakespeare(data_root, speakers=4, batch_size=37, train_size=101, test_size=40, validation_size=0)
        module = LitClassifier(seeded(0, lambda: RNNClassifier(hidden=16, dropout=0.2, num_classes=4)), num_classes=4)
        precision = "32-true" if exact else "64-true"
        return fit(module, data, devices, strategy=strategy, precision=precision, max_epochs=7, max_steps=20)

    one = ended(1, DDP(timeout=60, exact=exact))
    shapes = [(4, {"data_parallel_size": 2}), (3, {}), (2, {"balance": "time"})]
    for devices, options in shapes:
        other = ended(devices, pipeline(exact=exact, schedule="GPipe", **options))
        assert_same(weights(one), weights(other), atol=0 if exact else 1e-9)


class Conv(LightningModule):
    """Anyone's module: plain layers, one that works in place, tuples between stages, what is logged in usual ways."""

    def __init__(self, *extra: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(inplace=True), nn.GroupNorm(2, 8), *extra)
        self.second, self.third = Forked(), Joined()
        self.last = nn.Sequential(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 32), nn.ReLU(), nn.Linear(32, 10))
        self.accuracy = MulticlassAccuracy(10)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.third(*self.second(self.first(x))))

    def pipeline_stages(self) -> list[nn.Module]:
        return [*self.first, self.second, self.third, *self.last]

    def pipeline_loss(self, output: torch.Tensor, batch: Any) -> torch.Tensor:
        return F.cross_entropy(output, batch.labels)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        logits = self(batch.inputs)
        loss = F.cross_entropy(logits, batch.labels)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True, batch_size=len(logits))
        self.log("norm", logits.norm(dim=1).mean())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        logits = self(batch.inputs)
        self.accuracy(logits, batch.labels)
        self.log("val_loss", F.cross_entropy(logits, batch.labels), sync_dist=True, batch_size=len(logits))
        self.log("val_acc", self.accuracy, batch_size=len(logits))

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self(batch.inputs)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class Plateau(Conv):
    """Its learning rate follows what validation says."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, "max", patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


class Forked(nn.Module):
    """Gives what is differentiated, what is not, and whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.conv(x), x.detach(), x.argmax(1), x


class Joined(nn.Module):
    def forward(self, y: torch.Tensor, kept: torch.Tensor, index: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        assert not kept.requires_grad
        return y.relu() + 0.1 * kept + 0.01 * index[:, None] + x


def told(devices: int, folder: Path, strategy: Any, make: Make = Plateau, **kwargs: Any) -> tuple[Any, bytes, Any]:
    """Weights, the CSV log to the byte, and the test's scores."""
    logger = CSVLogger(folder, name="run", version=str(len(list(folder.glob("run/*")))))
    options = {"logger": logger, "log_every_n_steps": 1, "max_epochs": 3, **kwargs}
    data = digits(validation_size=50, augment=True)
    again = type(strategy)(**vars(strategy).get("given", {}))
    module = fit(make(), data, devices, strategy=strategy, **options)
    with quiet():
        scores = trainer(devices, strategy=again, **{**options, "logger": False}).test(module, data, verbose=False)
    return weights(module), (Path(logger.log_dir) / "metrics.csv").read_bytes(), scores


def given(kind: type, **options: Any) -> Any:
    """A strategy that knows how it was made, as one strategy serves one Trainer only."""
    strategy = kind(timeout=60, **options)
    strategy.given = {"timeout": 60, **options}
    return strategy


@pytest.mark.parametrize("name", ["teacher", "students", "resnet8"])
@pytest.mark.parametrize("settings", [{}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}], ids=str)
def test_exact_bits_are_those_of_one_process(name: str, settings: dict[str, Any], tmp_path: Path) -> None:
    one = told(1, tmp_path, given(DDP, exact=8), MODULES[name], **settings)
    for devices, options in SHAPES.values() if not settings else [SHAPES["3"]]:
        other = told(devices, tmp_path, given(PipelineStrategy, exact=8, **options), MODULES[name], **settings)
        assert_same(one[0], other[0])
        assert one[1:] == other[1:]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_exact_bits_under_every_schedule(schedule: str, tmp_path: Path) -> None:
    one = told(1, tmp_path, given(DDP, exact=4))
    other = told(2, tmp_path, given(PipelineStrategy, exact=4, schedule=schedule))
    assert_same(one[0], other[0])
    assert one[1:] == other[1:]


def test_exact_bits_of_torchvisions_resnet50() -> None:
    small = {"data": {"train_size": 21, "batch_size": 8}}
    one = fitted(MODULES["resnet50"], strategy=DDP(exact=8), **small)
    for devices, options in (SHAPES["3"], SHAPES["2x2"]):
        other = fitted(MODULES["resnet50"], devices, pipeline(exact=8, **options), **small)
        assert_same(weights(one), weights(other))


def test_exact_batch_norm_sees_a_shard_in_any_case() -> None:
    one, other = (
        fitted(lambda: classifier(ResNet, depth=8), n, strategy)
        for n, strategy in ((1, DDP(exact=8)), (2, pipeline(exact=8)))
    )
    assert_same(weights(one), weights(other))


@pytest.mark.parametrize("batch", [5, 3])  # fewer rows than micro-batches, and than stages
def test_exact_batches_smaller_than_their_number_of_shards(batch: int) -> None:
    small = {"data": {"train_size": 23, "batch_size": batch}}
    one = fitted(Conv, strategy=DDP(exact=8), **small)
    for devices, options in (SHAPES["3"], SHAPES["4"], SHAPES["2x2"]):
        assert_same(weights(one), weights(fitted(Conv, devices, pipeline(exact=8, **options), **small)))


def test_exact_bits_on_eight_processes() -> None:
    one = fitted(Conv, strategy=DDP(exact=8))
    assert_same(weights(one), weights(fitted(Conv, 8, pipeline(exact=8))))


def test_a_student_that_fails_is_frozen_alone() -> None:
    students = {"bad": (net(), CrossEntropy()), "ce": (net(), CrossEntropy())}
    with torch.no_grad():
        students["bad"][0].classifier[3].weight.fill_(float("inf"))
    module = Distillation(net(DeepNN), students, input_shape=SHAPE)
    before = weights(module)
    fit(module, digits(), 2, strategy=pipeline(exact=8))
    alone = fitted(lambda: distillation(["ce"]), strategy=DDP(exact=8))
    ended = {k: v for k, v in weights(module).items() if k.startswith("students.ce")}
    assert_same(ended, {k: v for k, v in weights(alone).items() if k.startswith("students.ce")})
    assert_same(
        {k: v for k, v in weights(module).items() if "bad" in k}, {k: v for k, v in before.items() if "bad" in k}
    )


PLAIN: dict[str, Any] = {"precision": "64-true", "max_epochs": 3}


def both(devices: int, options: dict[str, Any], **kwargs: Any) -> tuple[dict, dict]:
    settings = PLAIN | kwargs
    found = fitted(Conv, devices, pipeline(**options), **settings)
    return weights(fitted(Conv, **settings)), weights(found)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule(schedule: str) -> None:
    assert_same(*both(2, {"schedule": schedule, "num_microbatches": 4}), atol=1e-9)


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_clip_val": 0.05},
        {"gradient_clip_val": 0.001, "gradient_clip_algorithm": "value"},
        {"accumulate_grad_batches": 2},
        {"data": {"train_size": 23, "batch_size": 5}},
        {"data": {"validation_size": 50}},
    ],
    ids=str,
)
def test_what_trainers_do(options: dict[str, Any]) -> None:
    assert_same(*both(3, {"num_microbatches": 6}, **options), atol=1e-9)


@pytest.mark.parametrize("devices", [1, 2])
def test_the_naive_split(devices: int) -> None:
    assert_same(*both(devices, {"schedule": "GPipe", "num_microbatches": 1}), atol=1e-9)


def test_more_pipelines_than_rows_in_a_batch() -> None:
    data = {"data": {"train_size": 13, "batch_size": 6}}  # the last batch has one row for two pipelines
    one = fitted(MODULES["students"], **PLAIN, **data)
    two = fitted(MODULES["students"], 4, pipeline(data_parallel_size=2), **PLAIN, **data)
    assert_same(weights(one), weights(two), atol=1e-9)


def test_bfloat16() -> None:
    one, two = (fitted(Conv, n, strategy, precision="bf16-mixed") for n, strategy in ((1, None), (2, pipeline())))
    full = fitted(Conv)
    assert_same(weights(one), weights(two), atol=2e-2)
    assert not torch.equal(weights(two)["last.2.weight"], weights(full)["last.2.weight"])


def test_predictions_and_scores() -> None:
    module, data = Conv(), digits(validation_size=50)
    with quiet():
        one = trainer(strategy=DDP()).validate(module, data, verbose=False)
        two = trainer(2, strategy=pipeline()).validate(module, data, verbose=False)
    assert two == [pytest.approx(one[0], rel=1e-6)]
    assert type(module).forward is Conv.forward
    assert "forward" not in vars(module)


class Watcher(Callback):
    """Each rank writes down what it sees."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def tell(self, key: str, value: Any) -> None:
        with (self.folder / f"{dist.get_rank()}.jsonl").open("a") as file:
            file.write(json.dumps({key: value}) + "\n")

    def on_train_start(self, trainer: Trainer, module: Any) -> None:
        self.tell("own", [name for name, p in module.named_parameters() if not p.is_meta])

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.tell("logged", {name: float(value).hex() for name, value in trainer.logged_metrics.items()})
        self.tell("events", trainer.strategy.events)  # type: ignore[attr-defined]
        self.tell("lr", trainer.optimizers[0].param_groups[0]["lr"])

    def on_train_end(self, trainer: Trainer, *_: Any) -> None:
        self.tell("stopped", trainer.current_epoch)


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    """What three ranks saw, in order."""
    folder = tmp_path_factory.mktemp("watched")
    callbacks = [Watcher(folder), EarlyStopping("val_loss", patience=2, min_delta=10.0)]
    data = {"train_size": 400, "batch_size": 200, "validation_size": 50}
    options = {"max_epochs": 20, "callbacks": callbacks, "log_every_n_steps": 1, "data": data}
    fitted(Plateau, 3, pipeline(schedule="GPipe", num_microbatches=8), **options)
    return [[json.loads(line) for line in (folder / f"{n}.jsonl").read_text().splitlines()] for n in range(3)]


def seen(rank: list[dict[str, Any]], key: str) -> list[Any]:
    return [line[key] for line in rank if key in line]


def test_a_parameter_lives_on_one_rank(watched: list) -> None:
    owned = [seen(rank, "own")[0] for rank in watched]
    assert all(owned)
    assert [*itertools.chain(*owned)] == [name for name, _ in Conv().named_parameters()]


@pytest.mark.parametrize("key", ["logged", "lr", "stopped"])
def test_all_see_the_same(key: str, watched: list) -> None:
    ranks = [seen(rank, key) for rank in watched]
    assert ranks == [ranks[0]] * 3
    assert ranks[0]
    if key == "lr":
        assert len(set(ranks[0])) > 1  # the scheduler has followed val_loss
    if key == "stopped":
        assert ranks[0][0] < 20


def test_two_compute_at_the_same_time(watched: list) -> None:
    steps = zip(*(seen(rank, "events") for rank in watched), strict=True)
    for step in itertools.islice(steps, 1, None):  # the first one waits for what travels to be known
        spans = [(start, stop, rank) for rank, events in enumerate(step) for *_, start, stop in events]
        pairs = itertools.combinations(spans, 2)
        if any(a[2] != b[2] and a[0] < b[1] and b[0] < a[1] for a, b in pairs):
            return
    pytest.fail("no two ranks were ever at work at once")


def test_a_stage_waits_for_the_one_before(watched: list) -> None:
    for step in zip(*(seen(rank, "events") for rank in watched), strict=True):
        times = {tuple(event[:3]): event[3:] for events in step for event in events}
        for (stage, number, kind), (start, _) in times.items():
            before = stage + 1 if kind == "backward" else stage - 1
            if (before, number, kind) in times:
                assert times[before, number, kind][0] < start


class Steps(Callback):
    """Ends a fit after some steps of it, and keeps a checkpoint."""

    def __init__(self, path: Path, steps: int) -> None:
        self.path, self.steps = path, steps

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == self.steps and not self.path.exists():
            trainer.save_checkpoint(self.path)
            trainer.should_stop = True


def resumed(make: Make, path: Path, hops: list[tuple[int, Any]]) -> dict[str, torch.Tensor]:
    """Weights after as many fits, each of which goes on where the one before was stopped."""
    module = make()
    for number, (devices, strategy) in enumerate(hops):
        module, before = make(), path / f"{number}.ckpt"
        last = number == len(hops) - 1
        stop = Steps(path / f"{number + 1}.ckpt", 1000 if last else 2 * (number + 1))
        options = {"strategy": strategy, "max_epochs": 4, "callbacks": [stop]}
        with quiet():
            ckpt = str(before) if number else None
            trainer(devices, **options).fit(module, digits(), ckpt_path=ckpt, weights_only=True if number else None)
    return weights(module)


@pytest.mark.parametrize("name", ["teacher", "students"])
def test_runs_go_on_under_ddp_and_back(name: str, tmp_path: Path) -> None:
    one = fitted(MODULES[name], strategy=DDP(exact=8), max_epochs=4)
    shapes = [pipeline(exact=8, **options) for _, options in (SHAPES["3"], SHAPES["2x2"], SHAPES["4"])]
    hops = [
        (2, DDP(timeout=60, exact=8)),
        (3, shapes[0]),
        (4, shapes[1]),
        (1, DDP(timeout=60, exact=8)),
        (2, shapes[2]),
    ]
    assert_same(weights(one), resumed(MODULES[name], tmp_path, hops))
    layouts = [torch.load(tmp_path / f"{n}.ckpt", weights_only=True) for n in (1, 2, 3, 4)]
    for layout in layouts[1:]:
        assert list(layout["state_dict"]) == list(layouts[0]["state_dict"])
        for a, b in zip(layouts[0]["optimizer_states"], layout["optimizer_states"], strict=True):
            assert a["param_groups"] == b["param_groups"]
            assert list(a["state"]) == list(b["state"])
            for i, state in a["state"].items():
                assert {k: v.shape for k, v in state.items()} == {k: v.shape for k, v in b["state"][i].items()}


def kept(rank: int, folder: Path) -> None:
    """A script that fits and then saves, as each rank of torchrun's runs it."""
    module, made = Conv(), trainer(2, strategy=pipeline())
    with quiet():
        made.fit(module, digits(validation_size=50))
        made.save_checkpoint(folder / "after.ckpt")
    torch.save(module.state_dict(), folder / f"weights{rank}.pt")


def test_a_script_can_save_after_the_fit(tmp_path: Path) -> None:
    for run in launch(kept, tmp_path):
        assert run.wait(60) == 0, run.output
    saved = torch.load(tmp_path / "after.ckpt", weights_only=True)
    one = fitted(Conv)
    module, made = Conv(), trainer(2, strategy=pipeline(), max_epochs=2)
    with quiet():
        made.fit(module, digits(validation_size=50))
        made.save_checkpoint(tmp_path / "parent.ckpt")
    for state in (saved["state_dict"], *(torch.load(tmp_path / f"weights{n}.pt") for n in range(2))):
        assert list(state) == list(one.state_dict())
        assert_same(state, weights(module))
    assert len(saved["optimizer_states"][0]["state"]) == len(list(one.parameters()))
    assert_same(torch.load(tmp_path / "parent.ckpt", weights_only=True)["state_dict"], weights(module))


# What is refused


class Linear(LightningModule):
    """Four modules in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def pipeline_stages(self) -> list[nn.Module]:
        return list(self.net)

    def pipeline_loss(self, output: torch.Tensor, batch: Any) -> torch.Tensor:
        return F.cross_entropy(output, batch.labels)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return F.cross_entropy(self(batch.inputs), batch.labels)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Outside(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(3, 3)


class Tied(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.Linear(64, 64))
        self.net[2].weight = self.net[1].weight


class Twice(Linear):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return F.cross_entropy(self(batch.inputs) + self(batch.inputs), batch.labels)


class Never(Linear):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return F.cross_entropy(self.net(batch.inputs), batch.labels)


class Manual(Linear):
    automatic_optimization = False


class Named(nn.Module):
    def forward(self, x: Any) -> Any:
        return x["x"] if isinstance(x, dict) else {"x": x}


class Turned(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.t()


class Mapped(Linear):
    def __init__(self, layer: type[nn.Module] = Named) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), layer(), layer(), nn.Linear(32, 10))


class Vector(Linear):
    def pipeline_loss(self, output: torch.Tensor, batch: Any) -> torch.Tensor:
        return F.cross_entropy(output, batch.labels, reduction="none")


class Other(Linear):
    def pipeline_loss(self, output: torch.Tensor, batch: Any) -> torch.Tensor:
        return 2 * super().pipeline_loss(output, batch)


class Broken(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.net.insert(3, Breaks())


class Breaks(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("a bug of a stage's")


@pytest.mark.parametrize(
    ("devices", "options", "message"),
    [
        (2, {"schedule": "2F1B"}, "schedule 2F1B: expected GPipe, 1F1B"),
        (2, {"num_microbatches": 0}, "num_microbatches 0: expected at least 1"),
        (2, {"num_microbatches": 1}, "schedule 1F1B: expected one for 1 micro-batches and 2 ranks: Number of micro"),
        (
            2,
            {"schedule": "DualPipeV", "num_microbatches": 3},
            "schedule DualPipeV: expected .* as many microbatches as",
        ),
        (
            2,
            {"schedule": "ZBVZeroBubble", "stages_per_rank": 1},
            "schedule ZBVZeroBubble: expected .* exactly 2 stages",
        ),
        (2, {"schedule": "GPipe", "stages_per_rank": 2}, "schedule GPipe: expected .* one stage on each rank"),
        (3, {"data_parallel_size": 2}, "data_parallel_size 2: expected a number that divides the 3 devices"),
        (2, {"balance": "luck"}, "balance luck: expected parameters, time or a list"),
        (2, {"balance": [4]}, r"balance \[4\]: expected 2 numbers, one for each stage"),
        (2, {"balance": [4, 0]}, r"balance \[4, 0\]: expected at least one module for every stage"),
        (2, {"exact": 8, "num_microbatches": 4}, "num_microbatches 4: expected 8 or none, as the shards of exact 8"),
        (4, {"exact": 1, "data_parallel_size": 2}, "exact 1: expected at least 2"),
    ],
    ids=str,
)
def test_options_that_can_not_work_are_refused_at_once(devices: int, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        trainer(devices, strategy=pipeline(**options))


@pytest.mark.parametrize(
    ("make", "devices", "options", "message"),
    [
        (Linear, 5, {}, "expected at least 5 modules, one for each stage; Linear.pipeline_stages.* gives 4"),
        (Linear, 2, {"balance": [1, 1]}, r"balance \[1, 1\]: expected numbers that add up to 4"),
        (Outside, 2, {}, "expected every trainable parameter in a stage; extra.weight is in none"),
        (Tied, 2, {"balance": [2, 1]}, "a weight belongs to one stage; net.1.weight is in stages 0 and 1"),
        (Manual, 2, {}, "expected automatic optimization and Lightning's backward of Manual"),
        (lambda: Conv(nn.Dropout(0.1)), 2, {"exact": 8}, "exact 8: expected apprentice.keyed.Dropout .* first.3"),
        (LightningModule, 2, {}, "expected a module with pipeline_stages; LightningModule has none"),
    ],
)
def test_modules_that_can_not_be_cut_are_refused_before_ranks_start(
    make: Make, devices: int, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        fitted(make, devices, pipeline(**options))


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (Twice, {}, "Twice.training_step: expected one call of forward, got a second"),
        (Twice, {"exact": 8}, "Twice.training_step: expected one call of forward, got a second"),
        (Never, {}, "Never.training_step: expected one call of forward, got none"),
        (Never, {"exact": 8}, "Never.training_step: expected one call of forward, got none"),
        (
            Mapped,
            {"balance": [3, 2]},
            "the stage that ends with Named: expected a tensor or a tuple of tensors .* dict",
        ),
        (
            lambda: Mapped(Turned),
            {"balance": [3, 2]},
            r"ends with Turned: expected tensors with the batch's 5 rows first",
        ),
        (Vector, {}, r"Vector.pipeline_loss: expected a scalar tensor, got \(5,\)"),
        (Other, {}, "Other.pipeline_loss: expected the loss that training_step returns, .* got"),
        (Other, {"exact": 8}, "Other.pipeline_loss: expected the loss that training_step returns, .* got"),
        (Broken, {}, "a bug of a stage's"),
    ],
)
def test_what_shows_in_training_ends_it(make: Make, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ProcessRaisedException, match=message):
        fitted(make, 2, pipeline(**options), max_epochs=1)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (nn.BatchNorm2d(8), "first.3: BatchNorm sees a micro-batch"),
        (nn.Dropout(0.1), "first.3: noise from torch's generator"),
        (Dropout(0.1), ""),
    ],
)
def test_layers_whose_numbers_move_are_named(extra: nn.Module, message: str) -> None:
    # On one rank, so that the warning, an error here, is raised where it can be seen.
    if message:
        with pytest.raises(ProcessRaisedException, match=message):
            fitted(lambda: Conv(extra), 1, pipeline(), max_epochs=1)
    else:
        fitted(lambda: Conv(extra), 1, pipeline(), max_epochs=1)


# What it is made of


def test_no_other_cut_has_a_cheaper_dearest_stage() -> None:
    generator = random.Random(0)
    for _ in range(30):
        costs = [generator.choice([0.0, 1.0, 2.5, 7.0]) for _ in range(generator.randint(3, 7))]
        for count in (1, 2, 3):
            sizes = stages.sizes_by_cost(costs, count)
            cuts = [(0, *inner, len(costs)) for inner in itertools.combinations(range(1, len(costs)), count - 1)]
            dearest = min(max(sum(costs[a:b]) for a, b in itertools.pairwise(cut)) for cut in cuts)
            begins = [0, *itertools.accumulate(sizes)]
            assert sum(sizes) == len(costs)
            assert min(sizes) > 0
            assert max(sum(costs[a:b]) for a, b in itertools.pairwise(begins)) == pytest.approx(dearest)


class Clock:
    now = 0.0

    def perf_counter(self) -> float:
        return self.now


class Slow(nn.Module):
    """Takes a second, of a clock that nothing else moves."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Clock.now += 1
        return x * self.scale


class Uneven(Linear):
    """Some layers take all the time, another has nearly all parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        first = nn.Sequential(nn.Flatten(), nn.Linear(64, 256))
        self.net = nn.Sequential(first, *(Slow() for _ in range(4)), nn.Linear(256, 256), nn.Linear(256, 10))


class Placed(Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_start(self, trainer: Trainer, module: Any) -> None:
        if trainer.is_global_zero:
            self.path.write_text(json.dumps([name for name, p in module.named_parameters() if not p.is_meta]))


@pytest.mark.parametrize(("balance", "slow"), [("parameters", [1, 2, 3, 4]), ("time", [1, 2]), ([2, 5], [1])])
def test_stages_are_balanced_by_what_is_asked_for(
    balance: Any, slow: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("strategies.staging.timing.time", Clock())
    options = {"max_epochs": 1, "precision": "64-true"}
    placed = Placed(tmp_path / "names")
    module = fitted(Uneven, 2, pipeline(balance=balance), callbacks=[placed], **options)
    first = ["net.0.1.weight", "net.0.1.bias", *(f"net.{n}.scale" for n in slow)]
    assert json.loads(placed.path.read_text()) == first
    assert_same(weights(module), weights(fitted(Uneven, **options)), atol=1e-9)  # measuring has left no trace


def test_parcels_carry_any_tensors_and_their_gradients() -> None:
    torch.manual_seed(0)
    a = torch.randn(3, 4, 5, 6, dtype=torch.float64).to(memory_format=torch.channels_last).requires_grad_()
    b = torch.randn(3, 7, dtype=torch.bfloat16, requires_grad=True)
    c, d = torch.randint(0, 9, (3, 2)), torch.randn(5, 3).t()
    packing = Packing([Layout.of(x) for x in (a, b, c, d)], 5)
    parcel = packing.pack((a, b, c, d), torch.zeros((), requires_grad=True))
    arrived = parcel.detach().requires_grad_()
    found = packing.unpack(arrived, 3)
    for sent, x in zip((a, b, c, d), found, strict=True):
        assert torch.equal(sent, x)
        assert sent.stride() == x.stride()
        assert x.requires_grad == sent.requires_grad
    (found[0].relu_() * 2).sum().backward()  # works in place, and leaves b out
    parcel.backward(arrived.grad)
    assert torch.equal(a.grad, 2.0 * (a.detach() > 0))
    assert a.grad.stride() == a.stride()
    assert torch.equal(b.grad, torch.zeros_like(b))
    with pytest.raises(
        ValueError, match=r"expected a stage to give \(rows, 4, 5, 6\) float64 .* got \(rows, 2\) int64"
    ):
        packing.pack((c,), a)


def test_the_example_of_the_docs_runs_as_it_stands() -> None:
    text = (Path(__file__).parents[1] / "docs" / "pipeline.md").read_text()
    code = text.partition("```python\n")[2].partition("```")[0]
    assert len(code.splitlines()) <= 40
    options = "max_epochs=2, logger=False, enable_checkpointing=False, enable_progress_bar=False"
    code = code.replace("max_epochs=2", options)
    alone = code.replace("strategy=strategy", 'strategy="auto"').replace("devices=2", "devices=1")
    found: list[dict[str, Any]] = []
    for example in (code, alone):
        names: dict[str, Any] = {"__name__": "__main__"}
        torch.manual_seed(0)
        with warnings.catch_warnings(), quiet():
            warnings.simplefilter("ignore")  # Lightning's, about workers and steps to log at
            exec(compile(example, "docs/pipeline.md", "exec"), names)
        found.append(names)
    assert_same(weights(found[0]["module"]), weights(found[1]["module"]), atol=1e-4)
    assert found[0]["trainer"].callback_metrics["loss"] == pytest.approx(found[1]["trainer"].callback_metrics["loss"])
