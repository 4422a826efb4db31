"""Lightning's limits in batches: a count or a fraction of the global batches, the same samples on any devices."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer

import datamodules.text.plain_text
from apprentice.batch import Batch
from datamodules import Digits
from datamodules.text.plain_text import IGNORED
from experiments import gpt, kd
from harness.runs.quiet import quiet
from harness.studies.compare import compare, load_runs
from strategies import DDP
from tests.commands import results
from tests.grids import mostly_slow
from tests.language import text, written
from tests.pipelines import Conv, pipeline
from tests.training import classifier, digits, trainer

QUICK = [
    "--data", "Digits",
    "--teacher", "LightNN", "--seeds", "1", "--trainer.max_epochs", "1", "--only", "ce", "--data.batch_size", "40",
]  # fmt: skip


def limited(rank: int = 0, replicas: int = 1, **limits: float) -> Digits:
    """97 test and 41 held-out images in batches of 20, sorted by class, on a rank of a pretended trainer."""
    data = Digits(batch_size=20, train_size=101, validation_size=41, test_size=97)
    data.setup()
    for part, split in data._splits.items():
        data._splits[part] = split.take(split.labels.argsort(stable=True))
    place = {"num_replicas": replicas, "rank": rank}
    cpu = SimpleNamespace(root_device=torch.device("cpu"))
    data.trainer = SimpleNamespace(distributed_sampler_kwargs=place, strategy=cpu, training=False, **limits)  # type: ignore[assignment]
    return data


@pytest.mark.parametrize("replicas", [1, 2, 3, 8])
@pytest.mark.parametrize(("limit", "count"), [(1, 20), (3, 60), (9, 97), (0.45, 40), (1.0, 97), (0.99, 80)])
def test_all_ranks_together_evaluate_the_batches_of_one(limit: float, count: int, replicas: int) -> None:
    ranks = [limited(rank, replicas, limit_test_batches=limit) for rank in range(replicas)]
    loaders = [data.test_dataloader() for data in ranks]
    assert len({len(loader) for loader in loaders}) == 1
    left = ranks[0].trainer.limit_test_batches  # type: ignore[union-attr]
    assert left == 1.0 or (isinstance(left, int) and left >= len(loaders[0]))  # Lightning cuts no more off
    batches: list[Batch] = [batch for deal in zip(*loaders, strict=True) for batch in deal]
    index = torch.cat([batch.index for batch in batches])
    whole = torch.cat([batch.index for batch in limited(limit_test_batches=limit).test_dataloader()])
    assert torch.equal(index, whole)
    assert len(index) == len(index.unique()) == count
    test = ranks[0].split("test")
    assert torch.equal(torch.cat([batch.inputs for batch in batches]), test.inputs[index])
    assert torch.equal(torch.cat([batch.labels for batch in batches]), test.labels[index])


def test_few_samples_of_a_sorted_set_are_of_many_classes_and_lie_within_more() -> None:
    one, two = (next(iter(limited(limit_test_batches=n).test_dataloader())) for n in (1, 2))
    assert len(one.labels.unique()) >= 5
    more = torch.cat([batch.index for batch in limited(limit_test_batches=2).test_dataloader()])
    assert {*one.index.tolist()} < {*more.tolist()}
    assert len(two.labels) == 20


def test_counts_are_those_used() -> None:
    data = limited()

    def used(**limits: float) -> list[int]:
        return [*data.used(Trainer(accelerator="cpu", devices=1, logger=False, barebones=False, **limits)).values()]

    assert used() == [101, 41, 97]
    assert used(limit_train_batches=1, limit_val_batches=2, limit_test_batches=1) == [20, 40, 20]
    assert used(limit_train_batches=0.5, limit_val_batches=0, limit_test_batches=5) == [60, 0, 97]


def test_counts_of_a_text_are_the_tokens_of_its_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datamodules.text.plain_text, "EVALUATED", 16)  # two blocks at a time
    data = text(tmp_path)
    limits = {"limit_train_batches": 2, "limit_val_batches": 1, "limit_test_batches": 0.6}
    data.trainer = SimpleNamespace(  # type: ignore[assignment]
        distributed_sampler_kwargs=None,
        strategy=SimpleNamespace(root_device=torch.device("cpu")),
        training=False,
        **limits,
    )
    found = data.used(data.trainer)  # type: ignore[arg-type]
    assert found["train"] == 2 * 13 * 8
    for part, loader in (("validation", data.val_dataloader()), ("test", data.test_dataloader())):
        assert found[part] == sum(int((batch.labels != IGNORED).sum()) for batch in loader) < data.sizes[part]
    assert len(data.test_dataloader()) == 2  # of four


CASES: dict[str, Any] = {
    "plain": (classifier, None, "test", 0.7),
    "a count": (classifier, None, "test", 2),
    "validation": (classifier, None, "val", 0.7),
    "exact": (classifier, partial(DDP, exact=8, timeout=60), "test", 0.7),
    "pipeline": (Conv, pipeline, "test", 0.7),
}


@pytest.mark.parametrize("several", mostly_slow([2, 3], 3))
@pytest.mark.parametrize("case", CASES)
def test_scores_are_those_of_one_device(case: str, several: int) -> None:
    """Of 100 images in batches of 37 there are 74: 2 of 3 batches."""
    make, strategy, stage, limit = CASES[case]
    module, data, found = make(), digits(validation_size=100), []
    for devices in (1, several):
        options = {"strategy": strategy()} if strategy and devices > 1 else {}
        with quiet():
            made = trainer(devices, **{f"limit_{stage}_batches": limit}, **options)
            found += (made.test if stage == "test" else made.validate)(module, data, verbose=False)
    assert found[1] == pytest.approx(found[0], rel=1e-6)
    if make is classifier:
        assert found[0][f"{stage}/acc"] * 74 == pytest.approx(round(found[0][f"{stage}/acc"] * 74))


def run(out: Path, *flags: str) -> Any:
    kd.main([*QUICK, "--out", str(out), *flags])
    return results(out)


def test_a_limited_run_says_so_and_is_not_compared_with_a_whole_one(tmp_path: Path) -> None:
    flags = ["--data.train_size", "150", "--trainer.limit_train_batches", "2", "--trainer.limit_test_batches", "1"]
    few = run(tmp_path / "few", *flags, "--trainer.precision", "64-true")
    assert few["data"] == {"name": "Digits", "train": 80, "validation": 15, "test": 40}
    correct, accuracy = (few["students"]["ce"][key][0] for key in ("test_correct", "test_acc"))
    assert correct == round(accuracy * 40)
    told = (tmp_path / "few" / "results.md").read_text()
    assert "- Data: Digits: 80 train, 15 validation, 40 test samples\n" in told
    assert "trainer.limit_train_batches 2; trainer.limit_test_batches 1\n" in told
    two = run(tmp_path / "two", *flags, "--trainer.precision", "64-true", "--trainer.devices", "2")
    assert two["data"] == few["data"]
    assert two["students"]["ce"]["test_correct"] == few["students"]["ce"]["test_correct"]
    run(tmp_path / "subset", "--data.train_size", "80", "--data.validation_size", "15", "--data.test_size", "40")
    found = compare(load_runs([tmp_path / name for name in ("few", "two", "subset")])).to_json()
    differences = {row["name"]: row["differences"] for row in found["rows"]}
    assert differences == {"few/ce": [0.0], "two/ce": [0.0], "subset/ce": []}
    line = "subset is not compared with few/ce: other data (other samples in train and test)"
    assert any(line in note for note in found["notes"]), found["notes"]


def test_a_run_that_ends_in_mid_epoch_says_after_how_many(tmp_path: Path) -> None:
    flags = [*QUICK, "--data.train_size", "100", "--trainer.max_epochs", "9", "--trainer.max_steps", "5"]
    kd.main([*flags, "--out", str(tmp_path / "run")])
    found = results(tmp_path / "run")
    assert found["teacher"]["trained_epochs"] == found["students"]["ce"]["trained_epochs"] == [1.667]  # 5 of 3 batches
    said = "seed by seed: teacher and ce after 1.667 of 9 epochs."
    for page in ("results.md", "report.html"):
        assert said in (tmp_path / "run" / page).read_text()


@pytest.mark.parametrize(("held_out", "predicted"), [("0.1", 44), ("0", 0)])
def test_a_texts_run_counts_what_it_used(held_out: str, predicted: int, tmp_path: Path) -> None:
    flags = ["--data.path", str(written(tmp_path)), "--data.block_size", "8", "--trainer.max_steps", "2"]
    flags += ["--net.num_layers", "1", "--net.num_heads", "2", "--net.embed_dim", "8"]
    flags += ["--trainer.val_check_interval", "1"]
    flags += ["--trainer.limit_train_batches", "2", "--data.validation_size", held_out]
    gpt.main([*flags, "--out", str(tmp_path / "run")])
    sizes = {"train": 2 * 12 * 8, "validation": predicted, "test": 49}
    assert results(tmp_path / "run")["data"] == {"name": "Text", **sizes}
