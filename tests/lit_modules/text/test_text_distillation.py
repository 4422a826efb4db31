"""Language models are distilled token by token, by the same module and command, into the same kind of table."""

import json
import math
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from apprentice.errors import BadInput
from datamodules import Text
from experiments import compare, kd
from harness.reports.conclusions import conclude
from harness.reports.results import load_results
from harness.runs.nets import load_net
from harness.runs.safepoints import SafePoints
from lit_modules.classifier import LitClassifier
from lit_modules.distillation import Distillation
from lit_modules.nets import Outputs
from lit_modules.objectives import (
    AttentionScores,
    Cosine,
    CrossEntropy,
    HiddenStates,
    Hinton,
    JensenShannon,
    MiniLM,
    Objective,
    ReverseKL,
    Sum,
    Term,
)
from lit_modules.objectives.cross_entropy import cross_entropy
from lit_modules.tasks import BITS, Tokens, tokens
from tests.commands import kill_at, lasting, results, start
from tests.grids import mostly_slow
from tests.language import gpt, text, written
from tests.strategies.test_strategies import sgd
from tests.training import LinesLogger, assert_same, fit, on, weights


class Unmarked(Objective):
    """Someone's method, which does not say that a term is the cross-entropy, and calls another one so."""

    uses_teacher = False

    def forward(self, student: Outputs, teacher: Outputs | None, labels: torch.Tensor) -> dict[str, Term]:
        return {"ce": Term(2 * cross_entropy(student.logits, labels), 1.0)}


class Declares(Unmarked):
    by_token = True


OBJECTIVES = {
    "ce": CrossEntropy, "kd": Hinton, "reverse": ReverseKL, "js": JensenShannon, "cosine": Cosine,
    "hidden": HiddenStates, "scores": AttentionScores, "minilm": MiniLM,
}  # fmt: skip

SMALL = {"num_layers": 2, "embed_dim": 8, "tie_weights": False}


def distillation(data: Text, *names: str, **options: Any) -> Distillation:
    nets = {name: (gpt(**data.net_arguments, **SMALL, dropout=0.1), OBJECTIVES[name]()) for name in names or OBJECTIVES}
    teacher = gpt(**data.net_arguments, seed=1, tie_weights=False)
    shape = {"input_shape": data.input_shape, "num_classes": data.num_classes}
    return Distillation(teacher, nets, **shape, task=Tokens(data.tokens_per_character), **options)


def ended(folder: Path, place: str = "auto 1", names: tuple[str, ...] = (), **options: Any) -> LightningModule:
    """After two epochs, each of four batches of 13 and one of 3."""
    data = text(folder)
    made = {"optimizer": options.pop("optimizer")} if "optimizer" in options else {}
    return fit(distillation(data, *names, **made), data, **{"precision": "64-true"} | on(place) | options)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Distillation:
    folder = tmp_path_factory.mktemp("alone")
    return ended(folder, logger=LinesLogger(folder / "log"), log_every_n_steps=1)


@pytest.mark.parametrize("place", mostly_slow(["ddp 3", "ddp 2 exact 4", "fsdp 2", "pipeline 2"], "ddp 3"))
def test_float64_agrees_with_one_process(place: str, alone: Distillation, tmp_path: Path) -> None:
    assert_same(weights(alone), weights(ended(tmp_path, place)), atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["ddp 2 exact 4", "pipeline 2 exact 4"])
def test_exact_bits_are_those_of_one_process(place: str, tmp_path: Path) -> None:
    one, other = (weights(ended(tmp_path, where, precision="32-true")) for where in ("ddp 1 exact 4", place))
    assert_same(one, other)


@pytest.mark.slow
def test_local_sgd_of_every_step_is_one_process_sgd(tmp_path: Path) -> None:
    one, two = (ended(tmp_path, names=("js",), optimizer=sgd, **on(f"local_sgd {n}", period=1)) for n in (1, 2))
    assert_same(weights(one), weights(two), atol=1e-9)


@pytest.mark.parametrize("name", ["js", "cosine"])
def test_alone_and_in_company_a_student_ends_with_the_same_bits(name: str, alone: Distillation, tmp_path: Path) -> None:
    assert_same(weights(ended(tmp_path, names=(name,)).students[name]), weights(alone.students[name]))


def test_the_first_losses_are_the_formulas(alone: Distillation, tmp_path: Path) -> None:
    """Means over the first batch's tokens, written out; bits per character are the cross-entropy's."""
    data = text(tmp_path)
    batch = next(iter(data.train_dataloader()))
    module = distillation(data).double()
    with torch.no_grad():
        teacher = module.teacher(batch.inputs)
        student = module.train(False).students["ce"].net(batch.inputs)
    ce = torch.nn.functional.cross_entropy(student.flatten(0, 1), batch.labels.flatten())
    p, q = ((z / 2).softmax(-1) for z in (teacher, student))
    m = (p + q) / 2
    expected = {
        "ce/train/loss": ce,
        "kd/train/kd": 4 * (p * (p / q).log()).sum(-1).mean(),
        "reverse/train/reverse": 4 * (q * (q / p).log()).sum(-1).mean(),
        "js/train/js": 4 * (p * (p / m).log() + q * (q / m).log()).sum(-1).mean() / 2,
        "js/train/bpc": ce / math.log(2),
    }
    logger = LinesLogger(tmp_path / "log")
    nets = {name: (gpt(**data.net_arguments, **SMALL), OBJECTIVES[name]()) for name in OBJECTIVES}
    shape = {"input_shape": data.input_shape, "num_classes": data.num_classes, "task": Tokens()}
    still = Distillation(gpt(**data.net_arguments, seed=1, tie_weights=False), nets, **shape)
    fit(still, data, precision="64-true", max_epochs=1, logger=logger, log_every_n_steps=1)
    assert {tag: logger.values(tag)[0] for tag in expected} == pytest.approx(
        {tag: value.item() for tag, value in expected.items()}, abs=1e-9, rel=0
    )


def test_a_students_cross_entropy_is_computed_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    data = text(tmp_path)
    module = distillation(data, "ce", "cosine")
    module.students["ce"].objective = Sum([Hinton(), Unmarked()])
    batch = next(iter(data.train_dataloader()))
    outputs = module(batch.inputs)
    expected = module.losses(outputs, batch)[1]
    calls = []
    monkeypatch.setattr(tokens, "cross_entropy", lambda *given: calls.append(given) or cross_entropy(*given))
    found = module.losses(outputs, batch)[1]
    assert not calls
    module.students["ce"].objective = Unmarked()
    assert torch.equal(module.losses(outputs, batch)[1]["ce/bpc"], found["ce/bpc"])
    assert len(calls) == 1
    torch.testing.assert_close(found["ce/bpc"], expected["ce/0.ce"] / math.log(2))
    classifier = LitClassifier(module.teacher, data.num_classes, task=Tokens())
    losses, bits = (classifier.losses(outputs[1]["ce"].logits, batch)[1][name] for name in ("loss", "bpc"))
    torch.testing.assert_close(bits, losses.detach() / math.log(2))
    assert len(calls) == 1


# By the command

TEACHER = ["--teacher.num_layers", "2", "--teacher.num_heads", "2", "--teacher.embed_dim", "16"]
STUDENT = ["--student.num_layers", "1", "--student.num_heads", "2", "--student.embed_dim", "8"]
VARIANTS = ["--variants.reverse", "ReverseKL", "--variants.js", "JensenShannon", "--only", "ce", "kd", "reverse", "js"]


def flags(folder: Path, *more: str, student: str = "GPT", seeds: str = "1") -> list[str]:
    given = ["--data", "Text", "--data.path", str(written(folder)), "--data.block_size", "8", "--data.batch_size", "13"]
    given += ["--teacher", "GPT", *TEACHER, "--student", student, *(STUDENT if student == "GPT" else [])]
    return [*given, *VARIANTS, "--trainer.max_epochs", "2", "--seeds", seeds, *more]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kd")
    kd.main([*flags(folder, seeds="2"), "--out", str(folder / "run")])
    return folder / "run"


def test_a_run_leaves_loss_and_bits_in_place_of_accuracy(finished: Path) -> None:
    found = load_results(finished)
    assert found["metric"] == {"name": "test_bpc", "higher_is_better": False}
    assert found["data"] == {"name": "Text", "train": 405, "validation": 44, "test": 49}
    assert list(found["students"]) == ["ce", "kd", "reverse", "js"]
    for entry in [found["teacher"], *found["students"].values()]:
        assert not {"test_acc", "test_correct"} & entry.keys()
        assert entry["test_bpc"] == pytest.approx([loss / math.log(2) for loss in entry["test_loss"]])
        assert entry["train_flops"] > 0
    page = (finished / "results.md").read_text()
    assert "| test loss | bits per char | Δ to ce, bits |" in page
    assert "- Data: Text: 405 train, 44 validation, 49 test tokens\n" in page
    assert "Bits per character: mean ± standard deviation over 2 seeds." in page
    assert (finished / "results.png").stat().st_size > 0
    kd_bits = found["students"]["kd"]["test_bpc"]
    assert f"| {sum(kd_bits) / 2:.3f} ± " in page


def test_an_exported_student_has_the_loss_of_the_table(finished: Path) -> None:
    data = Text(finished.parent / "text", block_size=8)
    data.setup()
    tokens = data.vocabulary.encode((finished.parent / "text").read_text())[450:]
    for name, entry in results(finished)["students"].items():
        student = load_net(finished / "seed1" / name)
        losses = []
        for begin in range(0, 49, 8):  # each token but the first once, in blocks; the last overlaps the one before
            first = min(begin, 49 - 8)
            log_p = student(tokens[None, first : first + 8]).double().log_softmax(-1)[0]
            rows = range(begin - first, 8)
            losses += [-log_p[row, tokens[first + row + 1]].item() for row in rows]
        assert len(losses) == 49
        assert sum(losses) / 49 == pytest.approx(entry["test_loss"][1], abs=1e-6)


def test_a_loaded_teacher_is_tested_not_trained(finished: Path, tmp_path: Path) -> None:
    ckpt = finished / "seed0" / "teacher" / "weights.pt"
    kd.main([*flags(tmp_path, "--only", "kd"), "--teacher_ckpt", str(ckpt), "--out", str(tmp_path / "run")])
    found, before = results(tmp_path / "run"), results(finished)
    assert found["teacher"]["test_loss"] == before["teacher"]["test_loss"][:1]
    assert found["teacher"]["fit_seconds"] == [None]
    assert found["students"]["kd"]["test_loss"] == before["students"]["kd"]["test_loss"][:1]


def test_tensorboard_has_the_runs(finished: Path) -> None:
    events = EventAccumulator(str(finished / "seed0" / "js"))
    events.Reload()
    tags = set(events.Tags()["scalars"])
    assert {"train/loss_epoch", "train/bpc_epoch", "train/js_epoch", "val/bpc", "test/bpc", "test/loss"} <= tags
    assert not any("acc" in tag for tag in tags)


def test_runs_are_compared_by_their_bits(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["--only", "ce", "kd", "--variants.kd.temperature", "4"]
    again = [*flags(finished.parent, seeds="2"), *more, "--out", str(tmp_path / "t4")]
    kd.main(again)
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    compare.main([str(finished), "t4", "--out", "both"])
    page = capsys.readouterr().out
    assert "bits per char" in page
    found = json.loads(Path("both/compare.json").read_text())
    assert found["metric"] == "test_bpc"
    rows = {row["name"]: row for row in found["rows"]}
    bits = [results(run)["students"][name]["test_bpc"] for run, name in ((Path("t4"), "kd"), (finished, "ce"))]
    expected = sum(a - b for a, b in zip(*bits, strict=True)) / 2
    assert rows["t4/kd"]["delta"]["mean"] == pytest.approx(expected, abs=1e-9)
    assert rows["t4/ce"]["delta"]["mean"] == 0  # the same student, of the same seeds
    other = results(finished)
    other["metric"]["name"] = "test_acc"
    other["students"] = {n: e | {"test_acc": [0.5] * 2, "test_correct": [1] * 2} for n, e in other["students"].items()}
    Path("classes").mkdir()
    Path("classes/results.json").write_text(json.dumps(other))
    with pytest.raises(SystemExit):
        compare.main(["t4", "classes"])
    assert "expected a run of gpt.py, or of kd.py on texts, to compare with t4" in capsys.readouterr().err


def test_fewer_bits_are_better() -> None:
    differences = {"kd": [-0.02, -0.021, -0.022], "t8": [0.1, 0.11, 0.12]}
    said = conclude("ce", differences, BITS)
    assert "With 3 seeds, kd (-0.021) is better than ce" in said
    assert "t8 (+0.110) is worse than ce" in said


UNTIED = ["--teacher.tie_weights", "false", "--student.tie_weights", "false", "--student.dropout", "0.1"]
EXACT = ["--exact", "4", *UNTIED]


def left(out: Path) -> tuple[Any, dict[str, bytes]]:
    """The table without times, and the weights' files."""
    facts = results(out)
    rows = {"teacher": facts["teacher"], **facts["students"]}
    return lasting(rows), {name: (out / "seed0" / name / "weights.pt").read_bytes() for name in rows}


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, dict[str, bytes]]:
    folder = tmp_path_factory.mktemp("exact")
    start(folder / "one", *flags(folder, *EXACT)).check()
    return left(folder / "one")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "pipeline"])
def test_exact_runs_leave_the_very_files_of_one_device(strategy: str, exact: Any, tmp_path: Path) -> None:
    devices = ["--trainer.strategy", strategy, "--trainer.devices", "2"]
    start(tmp_path / "run", *flags(tmp_path, *EXACT, *devices)).check()
    assert left(tmp_path / "run") == exact
    assert len(exact[1]) == 5


@pytest.mark.slow
def test_a_killed_run_goes_on_and_ends_the_same(exact: Any, tmp_path: Path) -> None:
    out = tmp_path / "run"
    arm = kill_at(SafePoints, "on_train_batch_start", 14, after=True)  # the teacher's fit has ten batches
    start(out, *flags(tmp_path, *EXACT, "--checkpoint_every", "1e-9"), before=arm).check(-signal.SIGKILL)
    assert (out / "seed0" / "students.ckpt").exists()
    start(out, "--resume", "true", "--trainer.devices", "2").check()
    assert left(out) == exact


BIGRAMS = """
from torch import nn


class Bigrams(nn.Sequential):
    def __init__(self, vocab_size: int) -> None:
        super().__init__(nn.Embedding(vocab_size, 8), nn.Linear(8, vocab_size))
"""


def test_a_net_of_ones_own_may_begin_with_an_embedding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bigrams.py").write_text(BIGRAMS)
    monkeypatch.chdir(tmp_path)
    kd.main([*flags(tmp_path, student="bigrams.Bigrams"), "--only", "ce", "--out", "run"])
    student = load_net(tmp_path / "run" / "seed0" / "ce")
    tokens = torch.arange(8)[None]
    assert student(tokens).shape == (1, 8, student[1].out_features)
    students = {"kd": (student, Hinton())}
    teacher = gpt(student[1].out_features, tie_weights=False)
    module = Distillation(teacher, students, input_shape=(8,), input_dtype=torch.int64)
    x: Any = (tokens,)
    for stage in module.train().pipeline_stages():
        x = stage(*x)
    assert torch.equal(x[1]["kd"].logits, student(tokens))


def test_what_is_declared_of_texts_is_a_text_objectives(tmp_path: Path) -> None:
    data = text(tmp_path)
    students = {"own": (gpt(**data.net_arguments, **SMALL), Declares())}
    with pytest.raises(BadInput, match=r"^variants.own Declares: expected a TextObjective, as it has by_token"):
        Distillation(gpt(**data.net_arguments), students, data.input_shape, data.num_classes, task=Tokens())
