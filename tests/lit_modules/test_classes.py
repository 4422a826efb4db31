"""A trained net on data whose classes have another order, or other names: the same answers, or one line."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningDataModule

from apprentice.errors import BadInput
from datamodules import Digits
from datamodules.splits import Split
from experiments import kd
from harness.runs.facts import spec
from harness.runs.nets import load_net, read_classes, save_net
from lit_modules.distillation import Distillation
from lit_modules.nets import DeepNN, LightNN, ResNet, class_order, reorder_classes
from lit_modules.objectives import Hinton
from tests.commands import bad_input, refused, results
from tests.net_facts import facts
from tests.training import SHAPE, fit, net

NAMES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
BACKWARDS = NAMES[::-1]


class Named(Digits):
    class_names = tuple(NAMES)


class Sorted(Digits):
    """The same, with classes in the order of their names, as folders have them."""

    class_names = tuple(sorted(NAMES))

    def read(self) -> tuple[Split, Split]:
        numbers = torch.tensor([self.class_names.index(name) for name in NAMES])
        train, test = super().read()
        return Split(train.inputs, numbers[train.labels]), Split(test.inputs, numbers[test.labels])


class Fruit(Named):
    class_names = ("apple", "pear", *NAMES[2:])


@pytest.mark.parametrize(
    ("known", "wanted", "places", "told"),
    [
        (["cat", "dog"], ["cat", "dog"], [0, 1], ""),
        (["dog", "cat"], ["cat", "dog"], [1, 0], ""),
        (["a", "b", "c"], ["c", "a", "b"], [2, 0, 1], ""),
        (["Siamese cat, Siamese", "great-white shark"], ["Great_White Shark", "siamese"], [1, 0], ""),
        (["Cardigan", "cardigan"], ["cardigan", "Cardigan"], [1, 0], ""),
        (["crane", "crane"], ["crane", "crane"], [0, 1], ""),
        (["1", "0"], ["0", "1"], [1, 0], ""),
        (["cat", "dog"], ["0", "1"], [0, 1], "its classes cat; dog are taken for 0; 1"),
        (["tench", "goldfish"], ["n01440764", "n01443537"], [0, 1], "its classes tench; goldfish are taken for n"),
        ([], ["cat", "dog"], [0, 1], "its weights name no classes: they are taken for cat; dog"),
        (NAMES, [*NAMES[:9], "neun"], [*range(10)], "its classes nine are taken for neun"),
    ],
    ids=str,
)
def test_places_follow_the_names(known: list[str], wanted: list[str], places: list[int], told: str) -> None:
    order = class_order(known, wanted, "teacher", "X")
    assert (order.places, order.moves) == (places, places != sorted(places))
    assert order.note.startswith(told)
    assert bool(order.note) == bool(told)


@pytest.mark.parametrize(
    ("known", "wanted", "told"),
    [
        (["cat", "fish"], ["bird", "cat"], "it has fish, and the data has bird"),
        ([*NAMES[:9], "neun"], BACKWARDS, "it has neun, and the data has nine"),
        (
            ["rook", "rook", "cat"],
            ["cat", "rook", "bird"],
            "several of its classes have one name, and the data has bird",
        ),
    ],
)
def test_other_classes_are_refused(known: list[str], wanted: list[str], told: str) -> None:
    line = bad_input(class_order, known, wanted, "teacher", "X")
    assert line == f"teacher X: expected a net of the data's classes; {told}"


@pytest.mark.parametrize("make", [LightNN, ResNet])
def test_reordered_logits_are_the_same_ones(make: type) -> None:
    places, images, changed = [2, 0, 1, *range(3, 10)], torch.rand(3, *SHAPE), net(make)
    before = changed.eval()(images)
    changed.train()
    reorder_classes(changed, places, images[:2])
    assert changed.training
    torch.testing.assert_close(changed.eval()(images), before[:, places], rtol=0, atol=1e-6)
    with pytest.raises(BadInput, match="ends in a linear layer"):
        reorder_classes(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10)), places, torch.rand(2, *SHAPE))


RUN = ["--only", "kd", "--seeds", "1", "--trainer.max_epochs", "1", "--data.train_size", "200"]


def flags(data: type[LightningDataModule], out: Path, *more: str) -> list[str]:
    return [*RUN, "--data", f"{__name__}.{data.__name__}", "--out", str(out), *more]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("classes") / "run"
    kd.main(flags(Named, out))
    return out


def test_a_teacher_answers_by_the_datas_names(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = trained / "seed0" / "teacher"
    assert read_classes(folder) == load_net(folder).class_names == Named.class_names
    expected = results(trained)["teacher"]["test_correct"]
    loaded = ["--teacher_ckpt", str(folder / "weights.pt")]
    kd.main(flags(Sorted, tmp_path / "sorted", *loaded))
    assert results(tmp_path / "sorted")["teacher"]["test_correct"] == pytest.approx(expected, abs=1)  # by rounding
    images, places = torch.rand(3, *SHAPE), [NAMES.index(name) for name in Sorted.class_names]
    moved = load_net(tmp_path / "sorted" / "seed0" / "teacher")
    torch.testing.assert_close(moved(images), load_net(folder)(images)[:, places], rtol=0, atol=1e-6)
    assert moved.class_names == Sorted.class_names
    assert "name no classes" not in "".join(capsys.readouterr())
    refused(kd.main, [*flags(Fruit, tmp_path / "no")[:-2], *loaded], "--teacher_ckpt", "it has zero", tmp_path, capsys)
    further = [*loaded, "--teacher_epochs", "1"]
    kd.main(flags(Fruit, tmp_path / "fruit", *further))
    told = "it has zero, and the data has apple; its head begins with the weights of other classes\n"
    assert capsys.readouterr().out.count(told) == 1
    shutil.copy(folder / "weights.pt", tmp_path / "alone.pt")
    kd.main(flags(Sorted, tmp_path / "alone", "--teacher_ckpt", str(tmp_path / "alone.pt")))
    told = f"teacher_ckpt {tmp_path}/alone.pt: its weights name no classes: they are taken for eight; five; four; nine"
    assert capsys.readouterr().out.count(f"{told} and 6 more, in this order\n") == 1


def test_members_of_an_ensemble_answer_by_the_names_of_the_data(trained: Path, tmp_path: Path) -> None:
    kd.main(flags(Sorted, tmp_path / "sorted", "--only", "ce"))
    members = [trained / "seed0" / "teacher", tmp_path / "sorted" / "seed0" / "teacher"]
    kd.main(
        flags(Named, tmp_path / "run", "--teacher", "Ensemble", "--teacher.members", json.dumps([*map(str, members)]))
    )
    first, second = (load_net(folder) for folder in members)
    images, places = torch.rand(3, *SHAPE), [Sorted.class_names.index(name) for name in NAMES]
    expected = (first(images).softmax(1) + second(images).softmax(1)[:, places]) / 2
    found = load_net(tmp_path / "run" / "seed0" / "teacher")(images)
    torch.testing.assert_close(found.exp(), expected, rtol=0, atol=1e-6)


def test_a_teacher_in_python_is_refused_until_its_classes_are_those_of_the_data(tmp_path: Path) -> None:
    save_net(
        net(DeepNN),
        spec("lit_modules.nets.DeepNN", {"input_shape": SHAPE}),
        tmp_path,
        facts(classes=Sorted.class_names),
    )
    teacher = load_net(tmp_path)
    data = Named(train_size=40, validation_size=0, test_size=40)
    expected = "a net with the data's order of classes .zero; one; two; three and 6 more.; reorder_classes changes it"
    with pytest.raises(BadInput, match=f"^teacher DeepNN: expected {expected}; it has eight; five;"):
        fit(Distillation(teacher, {"kd": (net(), Hinton())}, SHAPE), data, max_epochs=1)
