"""Images that are read while a net trains: the same numbers as in memory, on any workers, devices, after any kill."""

import itertools
import multiprocessing
import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import get_worker_info

from apprentice.errors import BadInput
from apprentice.keyed import with_seed
from datamodules import ImageFolder, memory
from datamodules.streams import SampleStream
from experiments import kd
from harness.runs.safepoints import SafePoints
from lit_modules.classifier import LitClassifier
from lit_modules.nets import LightNN
from tests.callbacks import Saver
from tests.commands import bad_input
from tests.datamodules.test_image_folder import picture
from tests.grids import mostly_slow
from tests.harness.test_resume import kill_at
from tests.processes import Run
from tests.training import assert_same, fit, trainer, weights

STUDY = [
    "--data", "ImageFolder", "--data.image_size", "8", "--data.batch_size", "17", "--data.augment", "true",
    "--teacher", "LightNN", "--only", "ce", "--seeds", "[0]", "--trainer.max_epochs", "2", "--checkpoint_every", "1e-9",
]  # fmt: skip
FLIPS: list[Any] = ["RandomVerticalFlip", {"RandomErasing": {"value": "random"}}]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """35 cats and 30 dogs to train, 9 of each to test, of several sizes and kinds."""
    root = tmp_path_factory.mktemp("images")
    for part, label, count in (("train", "cat", 35), ("train", "dog", 30), ("test", "cat", 9), ("test", "dog", 9)):
        for i in range(count):
            picture(root / part / label / f"{i}.{'png' if i % 2 else 'jpg'}", i, (12 + i % 3, 10), ["RGB", "L"][i % 2])
    return root


def folder(root: Path, **options: Any) -> ImageFolder:
    """Batches of 17: neither 2 nor 3 divides one, or the set; augmented, transformed and mixed."""
    usual = {"batch_size": 17, "image_size": 8, "augment": True, "transforms": FLIPS, "cutmix": 1.0}
    return ImageFolder(root, **{**usual, **options})


def module() -> LitClassifier:
    return LitClassifier(with_seed(0, lambda: LightNN(input_shape=(3, 8, 8), num_classes=2)))


def ended(data: ImageFolder, devices: int = 1, **options: Any) -> dict[str, torch.Tensor]:
    found = weights(fit(module(), data, devices, **options))
    assert not multiprocessing.active_children()
    return found


@pytest.fixture(scope="module")
def in_memory(root: Path) -> dict[str, torch.Tensor]:
    return ended(folder(root, cache="memory"))


STREAMS = [("none", 0), ("none", 1), ("none", 3), ("none", None), ("memory", 2)]


@pytest.mark.parametrize(("cache", "workers"), mostly_slow(STREAMS, ("none", 0), ("none", 3), ("memory", 2)))
def test_it_trains_to_the_bits_of_memory(
    root: Path, in_memory: dict[str, torch.Tensor], cache: Any, workers: int | None
) -> None:
    data = folder(root, cache=cache, num_workers=workers)
    assert_same(ended(data), in_memory)
    assert isinstance(data.split("train"), SampleStream)


def test_without_augmentation_too_and_with_hidden_labels(root: Path) -> None:
    options: dict[str, Any] = {"augment": False, "transforms": None, "cutmix": 0.0, "labelled": 20}
    assert_same(ended(folder(root, cache="none", **options)), ended(folder(root, **options)))


@pytest.fixture(scope="module")
def float64_in_memory(root: Path) -> dict[str, torch.Tensor]:
    return ended(folder(root, cache="memory"), precision="64-true")


@pytest.mark.parametrize("devices", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_several_processes_end_as_one_in_memory(root: Path, float64_in_memory: Any, devices: int) -> None:
    streamed = ended(folder(root, cache="none", num_workers=2), devices, precision="64-true")
    assert_same(streamed, float64_in_memory, atol=1e-9)


def test_evaluation_sees_what_memory_has_in_its_order_also_under_a_limit(root: Path) -> None:
    for part in ("val", "test"):
        seen = []
        for cache in ("memory", "none"):
            data = folder(root, cache=cache)
            trainer(**{f"limit_{part}_batches": 1}).validate(module(), data) if part == "val" else trainer(
                limit_test_batches=1
            ).test(module(), data)
            seen.append(list(getattr(data, f"{part}_dataloader")()))
        for ours, other in zip(*seen, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(ours[:4], other[:4], strict=True))
            assert ours[4:] == other[4:]


@pytest.mark.slow
def test_resumed_at_any_moment_it_ends_the_same(root: Path, in_memory: dict[str, torch.Tensor], tmp_path: Path) -> None:
    data = folder(root, cache="none", num_workers=2)
    assert_same(ended(data, callbacks=[Saver(tmp_path, "on_train_batch_end")], max_epochs=3), ended(data, max_epochs=3))
    whole, checkpoints = ended(folder(root), max_epochs=3), sorted(tmp_path.glob("*.ckpt"))
    assert len(checkpoints) >= 10
    for checkpoint in checkpoints:
        resumed = module()
        trainer(max_epochs=3).fit(resumed, data, ckpt_path=checkpoint)
        assert_same(weights(resumed), whole)


def test_too_much_is_streamed(root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 10**6)
    data = folder(root, image_size=100)
    assert isinstance(data.split("test"), SampleStream)
    told = "83 of 3x100x100 take 0.00 GB, 0.00 GB are available"
    assert f"ImageFolder: images are read while training (cache none): {told}\n" in capsys.readouterr().err


@pytest.fixture
def copied(root: Path, tmp_path: Path) -> Path:
    return shutil.copytree(root, tmp_path / "copy")


@pytest.fixture
def damaged(copied: Path) -> Path:
    cut = copied / "train" / "dog" / "7.png"
    cut.write_bytes(cut.read_bytes()[:120])
    (copied / "test" / "cat" / "2.jpg").write_bytes(b"no image")
    return copied


@pytest.mark.parametrize("workers", [0, 2])
def test_a_damaged_image_stops_the_fit_by_its_path(damaged: Path, workers: int) -> None:
    with pytest.raises(BadInput, match=re.escape(str(damaged / "train" / "dog" / "7.png"))):
        fit(module(), folder(damaged, cache="none", num_workers=workers, validation_size=0))


@pytest.mark.parametrize("cache", mostly_slow(["memory", "none"], "none"))
def test_damaged_images_are_skipped_on_request(damaged: Path, cache: Any, capsys: pytest.CaptureFixture[str]) -> None:
    data = folder(damaged, cache=cache, on_error="skip", num_workers=1)
    assert data.sizes == {"train": 58, "validation": 6, "test": 17}
    assert f"ImageFolder: skipped in {damaged}: 2 damaged\n" in capsys.readouterr().err
    fit(module(), data)


def test_another_size_is_no_damage(root: Path) -> None:
    data = folder(root, image_size=None, cache="none", on_error="skip", transforms=None)
    with pytest.raises(BadInput, match="a size to bring all images to"):
        fit(module(), data)


def study(root: Path, out: Path, *flags: str, before: Callable[[], None] = lambda: None) -> Run:
    def main() -> None:
        before()
        kd.main([*STUDY, "--data.root", str(root), "--out", str(out), *flags])

    return Run(main, log=out.with_suffix(".log"))


def kill_a_worker() -> None:
    finished, calls = SampleStream.take, itertools.count()

    def counting(*args: Any) -> Any:
        if get_worker_info() and next(calls) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return finished(*args)

    SampleStream.take = counting  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def whole(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "run"
    run = study(root, out, "--data.cache", "memory")
    assert run.wait() == 0, run.output
    return out


def same_nets(out: Path, whole: Path) -> None:
    for name in ("teacher", "ce"):
        assert_same(*(torch.load(each / "seed0" / name / "weights.pt") for each in (out, whole)))


@pytest.mark.parametrize("victim", ["worker", pytest.param("process", marks=pytest.mark.slow)])
def test_a_killed_study_goes_on_to_the_bits_of_memory(root: Path, whole: Path, tmp_path: Path, victim: str) -> None:
    out, streamed = tmp_path / "run", ["--data.cache", "none", "--data.num_workers", "1"]
    in_mid_epoch = kill_at(SafePoints, "on_train_batch_start", 6, after=True)
    killed = study(root, out, *streamed, before=kill_a_worker if victim == "worker" else in_mid_epoch)
    if victim == "worker":
        assert killed.wait() == 2, killed.output
        found = (
            r"error: DataLoader worker (\(pid\D*\d+\) )?(is killed by signal: Killed|exited unexpectedly); with fewer"
        )
        assert re.match(found, killed.output.splitlines()[-1]), killed.output
    else:
        assert killed.wait() == -signal.SIGKILL, killed.output
    resumed = study(root, out, "--resume", "true")
    assert resumed.wait() == 0, resumed.output
    same_nets(out, whole)


@pytest.mark.slow
def test_damage_in_mid_epoch_costs_nothing_trained(root: Path, copied: Path, whole: Path, tmp_path: Path) -> None:
    out, victims = tmp_path / "run", sorted((copied / "train" / "dog").iterdir())

    def damage_later() -> None:
        started, calls = SafePoints.on_train_batch_start, itertools.count()

        def counting(*args: Any) -> None:
            for victim in victims if next(calls) == 2 else ():
                victim.write_bytes(b"no image")
            started(*args)

        SafePoints.on_train_batch_start = counting  # type: ignore[method-assign]

    stopped = study(copied, out, "--data.cache", "none", "--data.num_workers", "1", before=damage_later)
    assert stopped.wait() == 2, stopped.output
    assert any(str(victim) in stopped.output.splitlines()[-1] for victim in victims)
    assert (out / "seed0" / "teacher.ckpt").exists()
    for victim in victims:
        victim.write_bytes((root / victim.relative_to(copied)).read_bytes())
    resumed = study(copied, out, "--resume", "true")
    assert resumed.wait() == 0, resumed.output
    same_nets(out, whole)


def laid_out(root: Path, *parts: str) -> Path:
    for i, path in enumerate(f"{part}/{label}/{n}.png" for part in parts for label in "ab" for n in range(6)):
        picture(root / path, i)
    return root


def test_val_is_validated_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = ImageFolder(laid_out(tmp_path, "train", "val", "test"))
    assert data.sizes == {"train": 12, "validation": 12, "test": 12}
    first = Image.open(tmp_path / "val" / "a" / "0.png")
    assert np.array_equal(np.asarray(first), data.split("validation").inputs[0].permute(1, 2, 0).numpy())
    assert ImageFolder(tmp_path, validation_size=0).sizes["validation"] == 0
    assert ImageFolder(tmp_path, train_size=4).sizes == {"train": 4, "validation": 12, "test": 12}
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("test", [False, True], ids=["no test", "test without labels"])
def test_imagenets_layout_is_tested_on_val(tmp_path: Path, test: bool, capsys: pytest.CaptureFixture[str]) -> None:
    laid_out(tmp_path, "train", "val")
    if test:
        picture(tmp_path / "test" / "images" / "test_0.png", 0)
    assert ImageFolder(tmp_path, validation_size=2).sizes == {"train": 10, "validation": 2, "test": 12}
    why = "has no labels" if test else "is not there"
    told = f"ImageFolder: {tmp_path / 'test'} {why}: tests on val/, validates on images held out from train/\n"
    assert capsys.readouterr().err == told


def test_tiny_imagenets_labels_are_read_from_its_table(tmp_path: Path) -> None:
    for name in ("n02", "n01"):
        for i in range(3):
            picture(tmp_path / "train" / name / "images" / f"{name}_{i}.JPEG", i)
    for i in range(4):
        picture(tmp_path / "val" / "images" / f"val_{i}.JPEG", i)
    rows = [f"val_{i}.JPEG\t{'n01' if i in {1, 2} else 'n02'}\t0\t0\t9\t9\n" for i in range(4)]
    (tmp_path / "val" / "val_annotations.txt").write_text("".join(rows))
    data = ImageFolder(tmp_path, validation_size=0)
    assert data.sizes == {"train": 6, "validation": 0, "test": 4}
    assert data.class_names == ("n01", "n02")
    expected = [np.asarray(Image.open(tmp_path / "val" / "images" / f"val_{i}.JPEG")) for i in (1, 2, 0, 3)]
    assert np.array_equal(np.stack(expected), data.split("test").inputs.permute(0, 2, 3, 1).numpy())
    assert data.split("test").labels.tolist() == [0, 0, 1, 1]
    (tmp_path / "val" / "val_annotations.txt").write_text("val_0.JPEG\n")
    with pytest.raises(BadInput, match="a table of file names and classes"):
        ImageFolder(tmp_path).setup()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache": "ram"}, "data.cache ram: expected memory or none"),
        ({"on_error": "ignore"}, "data.on_error ignore: expected stop or skip"),
        ({"num_workers": -1}, "data.num_workers -1: expected a number of processes: 0, 1, 2, …, at most 512"),
        ({"image_size": 0}, "data.image_size 0: expected at least 1 pixel"),
    ],
    ids=str,
)
def test_impossible_options_are_refused(options: dict, message: str) -> None:
    assert bad_input(ImageFolder, "nowhere", **options) == message
