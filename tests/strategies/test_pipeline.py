"""A pipeline trains, evaluates and logs as one device does."""

import functools
import itertools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import EarlyStopping

from apprentice.keyed import with_seed
from datamodules import Shakespeare
from harness.runs.quiet import quiet
from lit_modules.classifier import LitClassifier
from lit_modules.nets import RNNClassifier
from strategies import DDP
from tests.callbacks import Notes
from tests.grids import mostly_slow
from tests.pipelines import MODULES, SCHEDULES, SHAPES, Conv, Plateau, fitted, pipeline
from tests.training import assert_same, digits, fit, trainer, weights


def settings(name: str) -> dict[str, Any]:
    small = {"data": {"train_size": 21, "batch_size": 8}, "max_epochs": 1} if name == "resnet50" else {}
    return {"precision": "64-true", "max_epochs": 7, "max_steps": 20, **small}


@functools.cache
def on_one_process(name: str) -> LightningModule:
    return fitted(MODULES[name], **settings(name))


PAIRS = [
    *(("students", shape) for shape in SHAPES), ("teacher", "3"), ("resnet8", "4"), ("resnet8", "2x2"),
    ("resnet50", "2"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "shape"), mostly_slow(PAIRS, ("students", "2")))
def test_training_ends_where_one_process_does(name: str, shape: str) -> None:
    devices, options = SHAPES[shape]
    if name == "resnet50":
        options = {**options, "num_microbatches": 4}  # to read as many weights for each row takes most of the time
    module = fitted(MODULES[name], devices, pipeline(**options), **settings(name))
    assert_same(weights(on_one_process(name)), weights(module), atol=1e-9)
    assert list(module.state_dict()) == list(on_one_process(name).state_dict())


@pytest.mark.slow
@pytest.mark.real_data
@pytest.mark.parametrize("exact", [None, 8])
def test_a_text_classifier_on_two_pipelines_of_two(exact: int | None, data_root: Path) -> None:
    """The hybrid of PyTorch's RPC tutorials with today's parts: embedding | GRU, head, gradients averaged over two."""

    def ended(devices: int, strategy: Any) -> LightningModule:
        data = Shakespeare(data_root, speakers=4, batch_size=37, train_size=101, test_size=40, validation_size=0)
        module = LitClassifier(
            with_seed(0, lambda: RNNClassifier(hidden=16, dropout=0.2, num_classes=4)), num_classes=4
        )
        precision = "32-true" if exact else "64-true"
        return fit(module, data, devices, strategy=strategy, precision=precision, max_epochs=7, max_steps=20)

    one = ended(1, DDP(timeout=60, exact=exact))
    shapes = [(4, {"data_parallel_size": 2}), (3, {}), (2, {"balance": "time"})]
    for devices, options in shapes:
        other = ended(devices, pipeline(exact=exact, schedule="GPipe", **options))
        assert_same(weights(one), weights(other), atol=0 if exact else 1e-9)


PLAIN: dict[str, Any] = {"precision": "64-true", "max_epochs": 3}


@functools.cache
def plain() -> dict[str, torch.Tensor]:
    return weights(fitted(Conv, **PLAIN))


def both(devices: int, options: dict[str, Any], **kwargs: Any) -> tuple[dict, dict]:
    found = fitted(Conv, devices, pipeline(**options), **PLAIN | kwargs)
    return weights(fitted(Conv, **PLAIN | kwargs)) if kwargs else plain(), weights(found)


@pytest.mark.parametrize("schedule", mostly_slow(SCHEDULES, "Interleaved1F1B", "ZBVZeroBubble"))
def test_every_schedule(schedule: str) -> None:
    assert_same(*both(2, {"schedule": schedule, "num_microbatches": 4}), atol=1e-9)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"gradient_clip_val": 0.05}, marks=pytest.mark.slow),
        pytest.param({"gradient_clip_val": 0.001, "gradient_clip_algorithm": "value"}, marks=pytest.mark.slow),
        {"accumulate_grad_batches": 2},
        pytest.param({"data": {"train_size": 23, "batch_size": 5}}, marks=pytest.mark.slow),
        pytest.param({"data": {"validation_size": 50}}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_what_trainers_do(options: dict[str, Any]) -> None:
    assert_same(*both(3, {"num_microbatches": 6}, **options), atol=1e-9)


@pytest.mark.parametrize("devices", mostly_slow([1, 2], 2))
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
        one = trainer(strategy=DDP(), precision="64-true").validate(module, data, verbose=False)
        two = trainer(2, strategy=pipeline(), precision="64-true").validate(module, data, verbose=False)
    assert two == [pytest.approx(one[0], rel=1e-6)]
    assert type(module).forward is Conv.forward
    assert "forward" not in vars(module)


def step(trainer: Any, module: Any) -> dict[str, Any]:
    return {
        "own": [name for name, p in module.named_parameters() if not p.is_meta],
        "logged": {name: float(value).hex() for name, value in trainer.logged_metrics.items()},
        "events": trainer.strategy.events,
        "lr": trainer.optimizers[0].param_groups[0]["lr"],
    }


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    notes = Notes(tmp_path_factory.mktemp("watched"), step, "on_train_batch_end")
    callbacks = [notes, EarlyStopping("val_loss", patience=2, min_delta=10.0)]
    data = {"train_size": 400, "batch_size": 200, "validation_size": 50}
    options = {"max_epochs": 20, "callbacks": callbacks, "log_every_n_steps": 1, "data": data}
    fitted(Plateau, 3, pipeline(schedule="GPipe", num_microbatches=8), **options)
    return notes.of_ranks()


def seen(rank: list[dict[str, Any]], key: str) -> list[Any]:
    return [facts[key] for facts in rank]


def test_a_parameter_lives_on_one_rank(watched: list) -> None:
    owned = [seen(rank, "own")[0] for rank in watched]
    assert all(owned)
    assert [*itertools.chain(*owned)] == [name for name, _ in Conv().named_parameters()]


def test_all_see_the_same(watched: list) -> None:
    for key in ("logged", "lr"):
        assert [seen(rank, key) for rank in watched] == [seen(watched[0], key)] * 3
    assert len({*seen(watched[0], "lr")}) > 1  # the scheduler has followed val_loss
    assert len(watched[0]) < 2 * 20  # it has stopped early


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


def test_the_example_of_the_docs_runs_as_it_stands() -> None:
    text = (Path(__file__).parents[2] / "docs" / "pipeline.md").read_text()
    code = text.partition("```python\n")[2].partition("```")[0]
    assert len(code.splitlines()) <= 40
    options = "max_epochs=2, logger=False, enable_checkpointing=False, enable_progress_bar=False"
    code = code.replace("max_epochs=2", options)
    alone = code.replace("strategy=strategy", 'strategy="auto"').replace("devices=2", "devices=1")
    found: list[dict[str, Any]] = []
    for example in (code, alone):
        names: dict[str, Any] = {"__name__": "__main__"}
        torch.manual_seed(0)
        with quiet(), warnings.catch_warnings(action="ignore"):  # Lightning's, about workers and steps to log at
            exec(compile(example, "docs/pipeline.md", "exec"), names)
        found.append(names)
    assert_same(weights(found[0]["module"]), weights(found[1]["module"]), atol=1e-4)
    assert found[0]["trainer"].callback_metrics["loss"] == pytest.approx(found[1]["trainer"].callback_metrics["loss"])
