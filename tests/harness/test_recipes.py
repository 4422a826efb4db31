"""Recipes set what published tables were made with, and give way to flags."""

from pathlib import Path
from typing import get_args

import pytest
import yaml

from apprentice.errors import BadInput
from experiments import kd
from harness.studies.recipes import DEFAULT, DEFAULT_OF_TEXTS, RECIPES, Recipe
from harness.studies.text.pretrained_settings import SETTINGS
from tests.commands import Refusal, results


def chosen(*flags: str) -> dict:
    parser = kd.parser()
    return parser.as_dict(parser.parse(flags))


def test_the_recipe_of_repdistiller_is_the_papers() -> None:
    found = chosen("--recipe", "repdistiller", "--data", "CIFAR100")
    data, optimizer, scheduler = (found[key]["init_args"] for key in ("data", "optimizer", "scheduler"))
    assert found["data"]["class_path"] == "datamodules.CIFAR100"
    assert (data["batch_size"], data["augment"], data["validation_size"]) == (64, True, 0)
    assert (found["trainer"]["max_epochs"], found["optimizer"]["class_path"]) == (240, "torch.optim.SGD")
    assert (optimizer["lr"], optimizer["momentum"], optimizer["weight_decay"]) == (0.05, 0.9, 5e-4)
    assert (scheduler["milestones"], scheduler["gamma"]) == ([150, 180, 210], 0.1)
    kd_options = found["variants"]["kd"]["init_args"]
    assert (kd_options["temperature"], kd_options["kd_weight"], kd_options["ce_weight"]) == (4.0, 0.9, 0.1)


def test_flags_beside_a_recipe_count() -> None:
    found = chosen(
        *("--recipe", "mdistiller", "--trainer.max_epochs", "2", "--data", "MNIST", "--data.batch_size", "32"),
        *("--optimizer", "Adam", "--scheduler", "null", "--variants.kd.kd_weight", "0.5", "--variants.dkd", "DIST"),
    )
    assert (found["trainer"]["max_epochs"], found["scheduler"]) == (2, None)
    assert (found["data"]["init_args"]["batch_size"], found["data"]["init_args"]["augment"]) == (32, True)
    assert found["optimizer"]["init_args"]["weight_decay"] == 0  # Adam's own, not that of the recipe's SGD
    assert found["variants"]["kd"]["init_args"]["kd_weight"] == 0.5
    assert found["variants"]["kd"]["init_args"]["temperature"] == 4.0
    assert found["variants"]["dkd"]["class_path"] == "lit_modules.objectives.DIST"


@pytest.mark.parametrize("name", get_args(Recipe))
def test_every_recipe_is_one_of_the_command_line(name: Recipe) -> None:
    found = chosen("--recipe", name)
    assert found["recipe"] == name
    assert found["trainer"]["max_epochs"] == RECIPES[name]["trainer.max_epochs"]
    ours = DEFAULT, DEFAULT_OF_TEXTS, "linearize"
    assert (found["data"]["init_args"]["validation_size"] == 0) is (name not in ours)


def test_chat_without_a_path_runs_the_recipe_of_texts() -> None:
    found = chosen("--data", "Chat")
    assert found == chosen("--recipe", DEFAULT_OF_TEXTS) == chosen("--data", "datamodules.Chat")
    assert (found["recipe"], found["data"]["init_args"]["path"]) == (DEFAULT_OF_TEXTS, None)
    assert [name for name, choice in found["variants"].items() if choice] == ["ce", "kd", "reverse", "gkd"]
    assert {found[key]["class_path"] for key in ("teacher", "student")} == {"lit_modules.nets.GPT"}
    other = chosen("--data", "Chat", "--students.a", "GPT", "--trainer.max_epochs", "2", "--data.batch_size", "4")
    assert (other["student"], other["students"]["a"]["init_args"]["embed_dim"]) == (None, 128)  # the class's own
    assert (other["teacher"], other["trainer"]["max_epochs"]) == (found["teacher"], 2)
    assert other["data"]["init_args"] == {**found["data"]["init_args"], "batch_size": 4}


def test_conversations_of_the_users_have_the_options_own_defaults() -> None:
    both = ("--teacher", "GPT", "--student", "GPT")
    found = chosen("--data", "Chat", "--data.path", "chat.jsonl", *both)
    plain = chosen("--data", "Chat", "--recipe", "null", *both)
    assert found["recipe"] is None
    assert found["data"]["init_args"] == {**plain["data"]["init_args"], "path": "chat.jsonl"}
    assert {**found, "data": None} == {**plain, "data": None}
    with_recipe = chosen("--recipe", DEFAULT_OF_TEXTS, "--data.path", "chat.jsonl")
    assert with_recipe["teacher"]["init_args"] == chosen("--data", "Chat")["teacher"]["init_args"]


def test_without_data_the_default_experiment_runs() -> None:
    found = chosen()
    assert found == chosen("--recipe", DEFAULT)
    assert (found["recipe"], found["data"]["class_path"]) == (DEFAULT, "datamodules.Digits")
    assert found["data"]["init_args"]["labelled"] == 30
    assert [name for name, choice in found["variants"].items() if choice] == ["ce", "kd", "hint", "ttm"]


def test_the_default_experiment_is_left_where_data_or_a_recipe_are_chosen(tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text("data: {class_path: Digits}\n")
    plain = chosen("--recipe", "null")
    assert chosen("--data", "Digits") == chosen("--config", str(tmp_path / "my.yaml")) == plain
    assert (plain["recipe"], plain["data"]["init_args"]["labelled"]) == (None, None)
    assert list(plain["variants"]) == ["ce", "kd", "cosine", "hint"]
    tutorial = chosen("--recipe", "tutorial")
    assert tutorial["data"]["init_args"] == {**plain["data"]["init_args"], "validation_size": 0}
    assert {key: tutorial[key] for key in ("variants", "teacher", "optimizer", "trainer")} == {
        key: plain[key] for key in ("variants", "teacher", "optimizer", "trainer")
    }
    other = chosen("--data", "MNIST")
    assert other == {**plain, "data": other["data"]}


def test_flags_beside_the_default_experiment_count() -> None:
    found = chosen("--data.labelled", "10", "--teacher", "LightNN", "--optimizer", "SGD", "--variants.cosine", "Cosine")
    assert (found["data"]["init_args"]["labelled"], found["optimizer"]["init_args"]["lr"]) == (10, 0.001)
    assert found["teacher"]["init_args"]["widths"] == [16, 16]
    assert found["variants"]["cosine"]["init_args"]["cosine_weight"] == 0.25


def test_a_run_of_the_default_experiment_goes_on_and_can_be_repeated(tmp_path: Path) -> None:
    out, small = (
        ("--out", str(tmp_path / "run")),
        ("--seeds", "1", "--trainer.max_epochs", "1", "--data.train_size", "80"),
    )
    kd.main([*small, "--only", "ce", *out])
    settings = (tmp_path / "run" / "config.yaml").read_text()
    kd.main(["--resume", "true", "--only", "ce", "cosine", "--variants.cosine", "Cosine", *out])
    assert [*results(tmp_path / "run")["students"]] == ["ce", "cosine"]
    (tmp_path / "config.yaml").write_text(settings)
    assert chosen("--config", str(tmp_path / "config.yaml")) == chosen(*small, "--only", "ce")


def test_a_run_of_before_there_was_a_default_experiment_goes_on(tmp_path: Path) -> None:
    out, small = (
        ("--out", str(tmp_path / "run")),
        ("--seeds", "1", "--trainer.max_epochs", "1", "--data.train_size", "80"),
    )
    kd.main(["--data", "Digits", *small, "--only", "kd", *out])
    settings, weights = (tmp_path / "run" / name for name in ("config.yaml", "seed0/kd/weights.pt"))
    before = yaml.safe_load(settings.read_text()), weights.read_bytes()
    kd.main(["--resume", "true", *out])
    assert (yaml.safe_load(settings.read_text()), weights.read_bytes()) == before


def test_a_recipe_for_images_is_refused_for_texts() -> None:
    with pytest.raises(BadInput, match=r"^data\.augment False: expected an option of Text.*\(in --recipe tutorial\)$"):
        chosen("--recipe", "tutorial", "--data", "Text", "--teacher", "GPT", "--student", "GPT")


def test_a_run_goes_on_with_its_own_settings(tmp_path: Path, refusal: Refusal) -> None:
    small = ("--data.train_size", "40", "--data.test_size", "20", "--seeds", "1", "--only", "kd")
    out = ("--out", str(tmp_path / "run"))
    kd.main(["--recipe", "repdistiller", "--trainer.max_epochs", "1", *small, *out])
    settings, weights = (tmp_path / "run" / name for name in ("config.yaml", "seed0/kd/weights.pt"))
    before = yaml.safe_load(settings.read_text()), weights.read_bytes()
    kd.main(["--resume", "true", *out])
    assert (yaml.safe_load(settings.read_text()), weights.read_bytes()) == before
    line = refusal(kd.main, "--resume", "true", "--recipe", "tutorial", *out)
    assert line.startswith("--recipe tutorial: expected repdistiller")


LM = ["--teacher", "HuggingFaceLM", "--teacher.name", "N", "--teacher.pretrained", "true"]
PRUNED = ["--student", "Pruned", "--student.layers", "2"]
WHOLE = ["--student", "lit_modules.nets.HuggingFaceLM", "--student.name", "N", "--student.pretrained=true"]


@pytest.mark.parametrize(
    "students", [PRUNED, WHOLE, ["--students.a", "GPT", "--students.b", "Mixer", "--only", "a-ce"]]
)
@pytest.mark.parametrize("path", [["--data.path", "x.jsonl"], []])
def test_students_of_a_pretrained_model_have_its_rate(students: list[str], path: list[str]) -> None:
    found = chosen("--data", "Chat", *path, *LM, *students)
    assert found["optimizer"]["class_path"] == "torch.optim.AdamW"
    assert found["optimizer"]["init_args"]["lr"] == SETTINGS["optimizer.lr"]
    assert found["scheduler"]["init_args"]["warmup_ratio"] == SETTINGS["scheduler.warmup_ratio"]
    assert found["trainer"]["gradient_clip_val"] == 1
    other = chosen("--data", "Chat", *path, *LM, *students, "--optimizer.lr", "2e-5")
    assert other["optimizer"]["init_args"]["lr"] == 2e-5
    assert {**other, "optimizer": None} == {**found, "optimizer": None}


@pytest.mark.parametrize("net", ["HuggingFaceLM", "HuggingFaceSeq2Seq"])
def test_so_have_those_of_another_teacher(net: str) -> None:
    flags = ["--student", net, "--student.name", "N", "--student.pretrained", "true", "--only", "ce"]
    assert chosen("--data", "Chat", *flags)["optimizer"]["init_args"]["lr"] == SETTINGS["optimizer.lr"]


@pytest.mark.parametrize(("flags", "optimizer"), [
    ([*LM, *PRUNED, "--optimizer", "SGD"], ("SGD", 1e-3)),
    ([*LM, *PRUNED, "--scheduler", "CosineWarmup"], ("Adam", 1e-3)),
    ([*LM, *PRUNED, "--recipe", "linearize"], ("AdamW", 1e-3)),
    ([*LM, "--student", "GPT"], ("Adam", 1e-3)),
    ([*LM[:4], "--student", "HuggingFaceLM", "--student.name", "N"], ("Adam", 1e-3)),
    (["--teacher", "GPT", *PRUNED], ("Adam", 1e-3)),
])  # fmt: skip
def test_other_students_and_choices_have_theirs(flags: list[str], optimizer: tuple[str, float]) -> None:
    found = chosen("--data", "Chat", "--data.path", "x.jsonl", *flags)["optimizer"]
    assert (found["class_path"].rpartition(".")[2], found["init_args"]["lr"]) == optimizer
