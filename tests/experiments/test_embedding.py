"""Nets that embed, end to end: figures recomputed from what a run leaves, vectors that leave, and what is refused."""

import io
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from apprentice.keyed import with_seed
from datamodules import Digits
from experiments import kd, predict
from harness.reports.results import Results, load_results
from harness.reports.samples import difference_over_both
from harness.reports.uncertainty import crossed_interval
from harness.runs.nets import load_net
from harness.studies.compare import compare, load_runs
from harness.studies.embedding import pictures
from lit_modules.classifier import LitClassifier
from lit_modules.embedding.neighbours import nearest, probe, shared_neighbours, vote
from lit_modules.embedding.task import Embedding
from lit_modules.nets import LightNN
from lit_modules.nets.embedder import Embedder
from lit_modules.tasks import Classification
from tests.commands import Refusal, nets, results, run_of
from tests.training import assert_same

SIZES = ["--data.train_size", "200", "--data.test_size", "100"]
EMBED = ["--data", "Digits", "--data.task", "embedding", *SIZES, "--teacher", "LightNN", "--trainer.max_epochs", "2"]
SEVERAL = ["--teachers.big", "DeepNN", "--taught_by.cosine", "{teacher: 1, big: 1}"]
QUEUE = ["--variants.queue.queue", "50"]

finished = run_of(kd, *EMBED, *QUEUE, "--seeds", "2", "--only", "untrained", "cosine", "queue", "tokens")


def whole() -> Digits:
    data = Digits(train_size=200, test_size=100)
    data.prepare_data()
    data.setup()
    return data


def samples(part: str) -> tuple[torch.Tensor, torch.Tensor]:
    data = whole()
    return data.samples(part, torch.arange(data.sizes[part]))


@torch.no_grad()
def test_figures_are_those_of_the_saved_nets(finished: Path) -> None:
    saved = results(finished)
    assert saved["metric"] == {"name": "test_neighbours", "higher_is_better": True}
    (bank, known), (queries, labels) = samples("train"), samples("test")
    teacher = Embedder(load_net(finished / "seed1" / "teacher"), (1, 8, 8)).eval()
    for name in ("untrained", "cosine", "queue", "tokens"):
        net, figures = load_net(finished / "seed1" / name), saved["students"][name]
        shared = shared_neighbours(net(queries), teacher(queries))
        assert figures["test_neighbours"][1] == pytest.approx(float(shared.mean()), abs=0.01)  # rows of another batch
        assert np.mean(figures["test_shared"][1]) == pytest.approx(figures["test_neighbours"][1], abs=1e-5)
        for key, classify in (("test_knn", vote), ("test_probe", probe)):
            right = (classify(net(queries), net(bank), known, 10) == labels).double().mean()
            assert figures[key][1] == pytest.approx(float(right), abs=0.011)
    assert saved["teacher"]["test_neighbours"] == [1.0, 1.0]
    assert saved["students"]["cosine"]["delta_vs_ce"]["mean"] == pytest.approx(
        np.mean(saved["students"]["cosine"]["test_neighbours"])
        - np.mean(saved["students"]["untrained"]["test_neighbours"])
    )


@torch.no_grad()
def test_intervals_are_over_seeds_and_images(finished: Path) -> None:
    """Of the differences of shared neighbours of each image, as the saved nets have them."""
    queries, _ = samples("test")
    rows = []
    for seed in ("seed0", "seed1"):
        teacher = Embedder(load_net(finished / seed / "teacher"), (1, 8, 8)).eval()(queries)
        cosine, untrained = (load_net(finished / seed / name)(queries) for name in ("cosine", "untrained"))
        rows.append((shared_neighbours(cosine, teacher) - shared_neighbours(untrained, teacher)).numpy())
    found = Results.read(load_results(finished))
    shown = difference_over_both(found, "cosine", "untrained")
    assert shown is not None
    assert shown == pytest.approx(crossed_interval(np.stack(rows)), abs=0.01)
    table = (finished / "results.md").read_text()
    assert "Δ alone, over seeds and test samples, points" in table
    assert found.metric.difference(shown) in table


def test_the_page_shows_neighbours_of_the_student_below_the_teachers(finished: Path) -> None:
    found = Results.read(load_results(finished))
    (section,) = pictures.section(found, finished / "seed0", "cosine", whole().test_images)
    assert [Image.open(io.BytesIO(png)).format for png in section.pictures] == ["PNG", "PNG"]
    queries, _ = samples("test")
    with torch.no_grad():
        near, _ = nearest(*[load_net(finished / "seed0" / "cosine")(queries)] * 2, 7, same=True)
    assert pictures.read_neighbours(finished / "seed0" / "cosine") == dict(enumerate(near[:4].tolist()))


def test_the_untrained_student_is_as_it_began_and_costs_nothing(finished: Path) -> None:
    begun = with_seed(1, lambda: LightNN((1, 8, 8), 10))
    ended = load_net(finished / "seed1" / "untrained")
    assert_same(Embedder(begun, (1, 8, 8)).state_dict(), ended.state_dict())
    untrained = results(finished)["students"]["untrained"]
    assert untrained["trained_epochs"] == [0, 0]
    assert untrained["step_ms"] is untrained["train_flops"] is None
    assert "Training ended early" not in (finished / "results.md").read_text()


def test_alone_is_as_in_company(finished: Path, tmp_path: Path) -> None:
    kd.main([*EMBED, *QUEUE, "--only", "queue", "--seeds", "1", "--out", str(tmp_path / "run")])
    assert_same(nets(tmp_path / "run", "seed0/queue"), nets(finished, "seed0/queue"))


def test_a_queue_has_the_same_bits_on_one_process_and_on_two(tmp_path: Path) -> None:
    for devices in ("1", "2"):
        flags = ["--exact", "4", "--trainer.devices", devices, "--out", str(tmp_path / devices)]
        kd.main([*EMBED, *QUEUE, "--only", "queue", "rkd", "--seeds", "1", *flags])
    assert_same(nets(tmp_path / "1"), nets(tmp_path / "2"))


def test_a_teacher_is_loaded_without_its_classifier(finished: Path, tmp_path: Path) -> None:
    """From the weights of a whole net; students learn from it as from the one that was trained."""
    flags = ["--teacher_ckpt", str(finished / "seed{seed}" / "teacher" / "weights.pt"), "--seeds", "1"]
    kd.main([*EMBED, *QUEUE, *flags, "--only", "queue", "--out", str(tmp_path / "run")])
    assert_same(nets(tmp_path / "run", "seed0/queue"), nets(finished, "seed0/queue"))
    assert results(tmp_path / "run")["teacher"]["fit_seconds"] == [None]


def test_finished_runs_are_compared_with_the_untrained_student(finished: Path, tmp_path: Path) -> None:
    flags = ["--only", "untrained", "tokens", "--variants.tokens.temperature", "0.2", "--seeds", "2"]
    kd.main([*EMBED, *flags, "--out", str(tmp_path / "other")])
    rows = {row.name: [*row.differences] for row in compare(load_runs([finished, tmp_path / "other"])).rows}
    assert rows["other/untrained"] == [0.0, 0.0]  # the same nets
    shared = results(tmp_path / "other")["students"]["tokens"]["test_neighbours"]
    untrained = results(finished)["students"]["untrained"]["test_neighbours"]
    assert rows["other/tokens"] == pytest.approx([a - b for a, b in zip(shared, untrained, strict=True)])


def test_checkpoints_are_of_a_classifier_and_of_nets_that_embed(tmp_path: Path) -> None:
    kd.main([*EMBED, "--only", "cosine", "--seeds", "1", "--save_ckpt", "true", "--out", str(tmp_path / "run")])
    teacher, student = (
        LitClassifier.load_from_checkpoint(tmp_path / "run" / "seed0" / name / "classifier.ckpt")
        for name in ("teacher", "cosine")
    )
    assert isinstance(teacher.task, Classification)
    assert isinstance(student.task, Embedding)
    inputs, _ = samples("test")
    assert student(inputs).shape == (100, student.net.width)


def test_students_of_the_teachers_width_have_its_space(tmp_path: Path) -> None:
    run = tmp_path / "run"
    flags = ["--embed", "teacher", "--student.widths", "[4,6]", "--only", "cosine", "--seeds", "1"]
    kd.main([*EMBED, *flags, "--out", str(run)])
    student, teacher = load_net(run / "seed0" / "cosine"), Embedder(load_net(run / "seed0" / "teacher"), (1, 8, 8))
    queries, _ = samples("test")
    assert student(queries).shape == teacher(queries).shape
    assert isinstance(student, Embedder)
    assert student.width == teacher.width


def test_students_begin_with_the_weights_of_a_net_that_embeds(finished: Path, tmp_path: Path, refusal: Refusal) -> None:
    """Beside new ones; of the classifier both have the same new weights."""
    path = str(finished / "seed{seed}" / "cosine")
    flags = ["--data", "Digits", *SIZES, "--data.labelled", "30", "--teacher", "LightNN", "--trainer.max_epochs", "1"]
    flags += ["--students.new", "LightNN", "--only", "ce", "--seeds", "2", "--student_ckpt.embedded", path]
    out = ["--out", str(tmp_path / "run")]
    line = refusal(kd.main, *flags, *out)
    assert line.startswith(f"--student_ckpt.embedded {path}: expected the name of a student")
    line = refusal(kd.main, *flags, "--students.embedded", "DeepNN", *out)
    assert line.startswith(f"--student_ckpt.embedded {finished}/seed0/cosine/weights.pt: expected weights that fit")
    assert not (tmp_path / "run").exists()
    kd.main([*flags, "--students.embedded", "LightNN", "--optimizer.lr", "1e-30", *out])
    begun = with_seed(1, lambda: LightNN((1, 8, 8), 10)).state_dict()
    embedded = {key.removeprefix("net."): x for key, x in load_net(finished / "seed1" / "cosine").state_dict().items()}
    for name, expected in {"new": begun, "embedded": {**begun, **embedded}}.items():
        assert_same(expected, load_net(tmp_path / "run" / "seed1" / f"{name}-ce").state_dict())


@torch.no_grad()
def test_predict_writes_vectors(finished: Path, tmp_path: Path) -> None:
    pixels = (samples("test")[0][:3, 0] * 0.3759 + 0.3049).clamp(0, 1).mul(255).round().byte()
    (tmp_path / "images").mkdir()
    for number, image in enumerate(pixels.numpy()):
        Image.fromarray(image).save(tmp_path / "images" / f"{number}.png")
    (tmp_path / "images" / "damaged.png").write_bytes(b"no image")
    out = tmp_path / "embeddings.npz"
    flags = ["--run", str(finished / "seed0" / "cosine"), "--inputs", str(tmp_path / "images"), "--out", str(out)]
    with pytest.raises(SystemExit) as stop:
        predict.main(flags)
    assert stop.value.code == 1  # one can't be read
    written = np.load(out)
    assert written["names"].tolist() == ["0.png", "1.png", "2.png", "damaged.png"]
    net = load_net(finished / "seed0" / "cosine")
    expected = net((pixels[:, None] / 255 - 0.3049) / 0.3759)
    np.testing.assert_allclose(written["embeddings"][:3], expected.numpy(), atol=1e-5)
    assert np.isnan(written["embeddings"][3]).all()


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (
            ["--only", "kd", "--variants.kd", "Hinton"],
            "--variants.kd Hinton: expected a method that compares embeddings; it learns from classes",
        ),
        (["--data.labelled", "30"], "--data.labelled 30: not allowed with --data.task embedding"),
        ([QUEUE[0], "200"], "--variants.queue.queue 200: expected fewer than the 200 training samples"),
        (
            ["--teachers.big", "DeepNN", "--taught_by.cosine", "big"],
            "--taught_by.cosine teacher-big: expected teacher among its teachers, whose neighbours judge all students",
        ),
        ([*SEVERAL, "--embed", "teacher"], "--embed teacher: expected own beside 0.5 teacher and 0.5 teacher-big"),
        (
            ["--teachers.big", f"{__name__}.Elsewhere", *SEVERAL[2:]],
            "--data.mean [0.3049]: expected [0.5], with which the weights of --teachers.big were trained",
        ),
        (
            ["--data.validation_size", "1"],
            "--data.validation_size 1: expected at least 2 images, which can be neighbours, or 0",
        ),
        (["--data.test_size", "1"], "--data.test_size 1: expected at least 2 images, which can be neighbours"),
        (["--metric", "f1"], "--metric f1: not allowed with --data.task embedding"),
    ],
)  # fmt: skip
def test_what_can_not_be_used_is_one_line(flags: list[str], line: str, refusal: Refusal, tmp_path: Path) -> None:
    assert refusal(kd.main, *EMBED, *flags, "--out", str(tmp_path / "run")).startswith(line)
    assert not (tmp_path / "run").exists()


def test_options_of_embeddings_are_of_embeddings_alone(refusal: Refusal, tmp_path: Path) -> None:
    line = refusal(kd.main, "--data", "Digits", "--embed", "teacher", "--out", str(tmp_path / "run"))
    assert line == "--embed teacher: expected --data.task embedding, not --data Digits"
    line = refusal(kd.main, "--data", "Digits", "--only", "c", "--variants.c", "EmbeddingMatch", "--out", str(tmp_path))
    assert line.startswith("--variants.c EmbeddingMatch: expected a method that compares classes")


class Pretrained(LightNN):
    """Brings its weights, as models of other libraries do: they depend on no seed."""

    def __init__(self, input_shape: tuple[int, int, int], num_classes: int = 10) -> None:
        super().__init__(input_shape, num_classes)
        other = with_seed(7, lambda: LightNN(input_shape, 10))
        self.features.load_state_dict(other.features.state_dict())


class Flat(nn.Sequential):
    """Has no maps."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, num_classes))


def test_the_zoo_is_all_that_compares_embeddings_and_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [*EMBED, *QUEUE, "--student", f"{__name__}.Flat", "--seeds", "1"]
    kd.main([*flags, "--zoo", "true", "--out", str(tmp_path / "zoo")])
    out = capsys.readouterr().out
    (others,) = [line for line in out.splitlines() if line.endswith(" do not compare embeddings")]
    assert others.startswith("without AdaptiveKL, AttentionTransfer, ")
    assert "Hinton" in others
    found = results(tmp_path / "zoo")["students"]
    assert found.keys() == {"untrained", "cosine", "mse", "kl", "queue", "rkd", "pkt", "cc"}
    assert all(f"without {name}: --variants.{name}" in out for name in ("tokens", "tokenmatch", "sp"))
    assert [*found] == sorted(found, key=lambda name: -found[name]["test_neighbours"][0])
    kd.main([*flags, "--only", "pkt", "--out", str(tmp_path / "one")])
    assert_same(nets(tmp_path / "one", "seed0/pkt"), nets(tmp_path / "zoo", "seed0/pkt"))


class Elsewhere(Pretrained):
    """Has learnt from images of another mean: no net is given those of another one."""

    def __init__(self, input_shape: tuple[int, int, int], num_classes: int = 10) -> None:
        super().__init__(input_shape, num_classes)
        self.expects = {"mean": (0.5,), "std": (0.5,)}


@torch.no_grad()
def test_a_student_of_several_teachers_is_judged_by_the_first(tmp_path: Path) -> None:
    """One teacher learns from the labels, the other brings its weights."""
    run = tmp_path / "run"
    others = ["--teachers.big", f"{__name__}.Pretrained", *SEVERAL[2:], "--only", "untrained", "cosine", "--seeds", "1"]
    kd.main([*EMBED, "--teacher", "DeepNN", *others, "--out", str(run)])
    saved, (queries, _) = results(run), samples("test")
    judge = Embedder(load_net(run / "seed0" / "teacher"), (1, 8, 8)).eval()(queries)
    for name in ("cosine", "teacher-big"):
        vectors = load_net(run / "seed0" / name)(queries)
        row = {**saved["students"], **saved["more_teachers"]}[name]
        assert row["test_neighbours"][0] == pytest.approx(float(shared_neighbours(vectors, judge).mean()), abs=0.01)
    assert saved["students"]["cosine"]["parameters"] == saved["students"]["untrained"]["parameters"]
    assert "cosine: taught by 0.5 teacher and 0.5 teacher-big" in (run / "results.md").read_text()


def test_folders_need_no_classes_and_a_net_that_brings_weights_is_not_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, rng = tmp_path / "images", np.random.default_rng(0)
    (folder / "deeper").mkdir(parents=True)
    for number in range(40):
        image = Image.fromarray(rng.integers(0, 255, (8, 8, 3), dtype=np.uint8))
        image.save(folder / ("deeper" if number % 2 else ".") / f"{number}.png")
    shutil.copy(folder / "0.png", folder / "deeper" / "notes.txt")
    flags = ["--data", "ImageFolder", "--data.root", str(folder), "--data.task", "embedding", "--seeds", "1"]
    flags += ["--trainer.max_epochs", "1", "--only", "untrained", "cosine", "--out", str(tmp_path / "run")]
    with pytest.raises(SystemExit):
        kd.main([*flags, "--teacher", "LightNN"])
    line = "error: --teacher LightNN: expected a teacher that is loaded: ImageFolder has no classes"
    assert line in capsys.readouterr().err
    kd.main([*flags, "--teacher", f"{__name__}.Pretrained"])
    printed = capsys.readouterr()
    assert (
        "teacher Pretrained: its weights depend on no seed, so they are taken as trained" in printed.out + printed.err
    )
    assert "split by class" not in printed.out + printed.err
    saved = results(tmp_path / "run")
    assert saved["data"]["train"] + saved["data"]["validation"] + saved["data"]["test"] == 40
    assert saved["teacher"]["fit_seconds"] == [None]
    assert "test_knn" not in saved["students"]["cosine"]
