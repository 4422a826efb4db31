"""One pass that distils to several nets, by several methods or by all, and what is said of the nets' layers."""

from argparse import Namespace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from matplotlib.figure import Figure
from matplotlib.text import Text

from apprentice.errors import BadInput
from experiments import compare, kd
from harness.reports.bakeoff.notes import notes
from harness.reports.bakeoff.plots import picture
from harness.reports.bakeoff.table import table
from harness.reports.charts import Style, spread
from harness.reports.combine import combine
from harness.runs.arm_names import arm_names
from harness.runs.plans import arms
from harness.studies import zoo
from lit_modules.nets import Outputs
from lit_modules.objectives import Objective, Term
from lit_modules.objectives.context import NO_STEP, StepContext
from lit_modules.objectives.cross_entropy import ce_term
from tests.bake_off_facts import header, student, teacher
from tests.commands import Refusal, nets, results, run_of
from tests.training import assert_same

SMALL = [
    "--data", "Digits",
    "--teacher", "LightNN", "--seeds", "1", "--trainer.max_epochs", "1", "--data.train_size", "150",
    "--trainer.logger", "false",
]  # fmt: skip
RES = ["--students.res", "ResNet", "--students.res.depth", "8"]
TWO = ["--students.small", "LightNN", *RES, "--only", "ce", "small-hint"]


two = run_of(kd, *SMALL, *TWO)


@pytest.fixture(scope="module")
def all_methods(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("zoo") / "run"
    flags = ["--zoo", "true", "--variants.ce", "CrossEntropy", "--variants.kd.temperature", "4"]
    kd.main([*SMALL, *flags, "--variants.mine", "Hint", "--out", str(out)])
    return out


def test_each_row_is_what_its_net_gives_alone(two: Path, tmp_path: Path) -> None:
    alone = {"small": ["--student", "LightNN"], "res": ["--student", "ResNet", "--student.depth", "8"]}
    entries = results(two)["students"]
    assert list(entries) == ["small-ce", "small-hint", "res-ce"]
    for name, flags in alone.items():
        kd.main([*SMALL, *flags, "--only", "ce", "hint", "--out", str(tmp_path / name)])
        rows = results(tmp_path / name)["students"]
        for variant in [row.removeprefix(f"{name}-") for row in entries if row.startswith(f"{name}-")]:
            entry = entries[f"{name}-{variant}"]
            assert_equal_nets(two, f"{name}-{variant}", tmp_path / name, variant)
            for key in ("objective", "parameters", "train_flops", "test_correct", "delta_vs_ce"):
                assert entry[key] == rows[variant][key]
            assert (entry["variant"], entry["baseline"]) == (variant, f"{name}-ce")
    assert_equal_nets(two, "teacher", tmp_path / "small", "teacher")


def assert_equal_nets(out: Path, name: str, other: Path, other_name: str) -> None:
    states = nets(out, f"seed0/{name}"), nets(other, f"seed0/{other_name}")
    assert_same(*({key.partition(".")[2]: value for key, value in state.items()} for state in states))


def test_a_run_grows_by_nets(two: Path, tmp_path: Path) -> None:
    out = tmp_path / "grown"
    kd.main([*SMALL, "--students.small", "LightNN", "--only", "ce", "--out", str(out)])
    kd.main(["--out", str(out), "--resume", "true", *RES, "--only", "ce", "small-hint"])
    assert_same(nets(out), nets(two))
    assert results(out)["students"].keys() == results(two)["students"].keys()
    compare.main([str(two), str(out), "--out", str(tmp_path / "compared")])


class Mutual(Objective):
    """Logits as those of peers.

    Args:
        peers: names of students.
    """

    uses_teacher = False

    def __init__(self, peers: list[str]) -> None:
        super().__init__()
        self.peers = peers

    def forward(
        self, student: Outputs, teacher: Outputs | None, labels: torch.Tensor, context: StepContext = NO_STEP
    ) -> dict[str, Term]:
        found = [context.peers[peer].logits for peer in self.peers]
        return {"mutual": Term((student.logits - sum(found)).square().mean(1), 1.0), "ce": ce_term(student, labels, 1)}


def test_peers_are_of_the_same_net_or_named_as_rows(tmp_path: Path, refusal: Refusal) -> None:
    mutual = f"{__name__}.Mutual"
    flags = ["--variants.a", mutual, "--variants.a.peers", "[b]", "--variants.b", mutual, "--variants.b.peers", "[ce]"]
    flags += ["--variants.c", "Sum", "--variants.c.objectives", f"[{mutual}]"]
    flags += ["--variants.c.objectives.0.peers", "[res-ce]"]
    only = ["a", "small-c"]  # which draw in b, and ce
    kd.main([*SMALL, *TWO[:-3], *flags, "--only", *only, "--out", str(tmp_path / "both")])
    kd.main([*SMALL, *flags, "--only", "a", "--out", str(tmp_path / "one")])
    rows = {f"{student}-{variant}" for student in ("small", "res") for variant in ("a", "b", "ce")}
    assert results(tmp_path / "both")["students"].keys() == {"small-c", *rows}
    for name in ("a", "b"):
        assert_equal_nets(tmp_path / "both", f"small-{name}", tmp_path / "one", name)
    late = ["--variants.d", mutual, "--variants.d.peers", "[ce]", "--only", "a", "d"]
    line = refusal(kd.main, "--out", tmp_path / "one", "--resume", "true", *late)
    assert line.startswith("--variants.d.peers ce: expected students that begin with it; ce was tr")


def test_rows() -> None:
    variants, students = dict.fromkeys(("ce", "kd")), dict.fromkeys(("a", "b"))

    def rows(students: Any, *only: str) -> list[str]:
        return list(arm_names(Namespace(variants=variants, students=students, only=[*only] or None)))

    assert rows({}) == ["ce", "kd"]
    assert rows({}, "kd") == ["kd"]
    assert rows(students) == ["a-ce", "a-kd", "b-ce", "b-kd"]
    assert rows(students, "kd", "b-ce") == ["a-kd", "b-ce", "b-kd"]
    with pytest.raises(BadInput):
        rows({}, "a-kd")


def test_the_zoo_is_all_that_fits_the_best_first(all_methods: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = yaml.safe_load((all_methods / "config.yaml").read_text())
    named = {"ce": "CrossEntropy", "kd": "Hinton", "cosine": "Cosine", "hint": "Hint"}
    assert settings["variants"].keys() == {*zoo.methods(named), "mine"}
    assert settings["variants"]["kd"]["init_args"]["temperature"] == 4
    found = results(all_methods)["students"]
    assert {"ce", "kd", "mine", "rkd", "sp", "pkt"} <= found.keys()
    assert "deittoken" not in found
    scores = [entry["test_acc"][0] for entry in found.values()]
    assert scores == sorted(scores, reverse=True)
    before = (all_methods / "results.json").read_bytes()
    kd.main(["--out", str(all_methods), "--resume", "true"])
    out, err = capsys.readouterr()
    said = [line for line in out.splitlines() if line.startswith("without ")]
    begins = "without deittoken: --variants.deittoken.student_layer head_dist: expected a layer of LightNN"
    assert any(line.startswith(begins) for line in said)
    assert out.index("without deittoken") < out.index("teacher  ")
    assert not err
    again = results(all_methods)
    assert list(again["students"]) == list(found)
    assert before
    rows = [line.split()[0] for line in out.splitlines() if line.split()[:1] and line.split()[0] in found]
    assert rows[: len(found)] == list(found)


@pytest.mark.slow
def test_a_run_grows_into_the_zoo(all_methods: Path, tmp_path: Path) -> None:
    out = tmp_path / "grown"
    kd.main([*SMALL, "--variants.kd.temperature", "4", "--variants.mine", "Hint", "--out", str(out)])
    kept = (out / "seed0" / "students.json").read_bytes()
    kd.main(["--out", str(out), "--resume", "true", "--zoo", "true"])
    assert (out / "seed0" / "students.json").read_bytes() == kept
    assert_same(nets(out), nets(all_methods))


def test_the_zoo_names_what_fails_and_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    parser = kd.parser()
    config = parser.parse(["--zoo", "true", "--only", "ce", "--variants.strange", "Hint"])
    config.only = None

    def make(names: Any) -> Any:
        if names == ["sp"]:
            raise RuntimeError("no such shape\nand more")
        if names == ["rkd"]:
            raise BadInput("strategy", "Pipe", "another")
        if names != ["ce"]:
            raise BadInput("variants.x", 1, "2")

    assert zoo.list_fitting(config, parser, arms(config), make) == ["ce"]
    lines = capsys.readouterr().out.splitlines()
    assert "without sp: no such shape" in lines
    assert "without rkd: --trainer.strategy Pipe: expected another" in lines
    assert "without strange: --variants.x 1: expected 2" in lines


def test_layers_are_listed_and_nothing_is_trained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kd.main(
        [
            "--data",
            "Digits",
            "--list_layers",
            "true",
            "--students.light",
            "LightNN",
            *RES,
            "--out",
            str(tmp_path / "out"),
        ]
    )
    out, err = capsys.readouterr()
    assert not err
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert [line for line in lines if line.startswith(("teacher", "students"))] == [
        "teacher DeepNN", "students.light LightNN", "students.res ResNet",
    ]  # fmt: skip
    deep, res = lines[: lines.index("students.light LightNN")], lines[lines.index("students.res ResNet") :]
    assert {"default features (32, 2, 2)", "pooled classifier< (128)", "stage1 features.4 (64, 4, 4)"} <= {*deep}
    assert {"stage1.pre features.3< (64, 8, 8)", "features.3 ReLU (64, 8, 8)", "classifier.3 Linear (10)"} <= {*deep}
    assert {"default stage3 (64, 2, 2)", "stage2 Sequential (32, 4, 4)", "stage1.0.relu ReLU (16, 8, 8)"} <= {*res}
    assert not (tmp_path / "out").exists()


def made(ranked: bool = False) -> Any:
    correct = {"a-ce": (360, 364), "a-kd": (370, 372), "b-ce": (380, 381), "b-kd": (380, 383), "c-kd": (1, 2)}
    students = {name: [student(number) for number in numbers] for name, numbers in correct.items()}
    students["c-kd"] = [student(0, {"step": 1, "term": "kl"})] * 2
    variants = {name: name.partition("-")[2] for name in correct}
    run = header(2)
    run.config["zoo"] = ranked
    return combine(run, [teacher()] * 2, students, [1.0] * 2, variants=variants)


def test_differences_are_to_the_same_net() -> None:
    found = made()
    means = {name: student.delta_vs_ce["mean"] for name, student in found.students.items()}
    assert means == {"a-ce": 0, "a-kd": pytest.approx(0.0225), "b-ce": 0, "b-kd": pytest.approx(0.0025), "c-kd": None}
    shown = {row[0]: row[4].partition(" ")[0] for row in table(found).rows}
    assert shown == {"teacher": "—", "a-ce": "—", "a-kd": "+2.25", "b-ce": "—", "b-kd": "+0.25", "c-kd *": "—"}
    said = " ".join(notes(found))
    assert "a-kd can't be told apart from a-ce." in said
    assert "b-kd can't be told apart from b-ce." in said
    assert "No student is called c-ce, so its rows have no differences." in said


def test_ranked_rows_have_the_best_first_and_failures_last() -> None:
    assert list(made(ranked=True).students) == ["b-kd", "b-ce", "a-kd", "a-ce", "c-kd"]


def test_names_move_as_little_as_keeps_them_apart() -> None:
    assert spread([0.2, 0.5, 0.9], 0.1) == pytest.approx([0.2, 0.5, 0.9])
    assert spread([0.5, 0.5, 0.5], 0.1) == pytest.approx([0.4, 0.5, 0.6])
    assert spread([0.0, 0.0, 0.9], 0.1) == pytest.approx([0.0, 0.1, 0.9])
    assert spread([0.95, 1.0], 0.5) == pytest.approx([0.5, 1.0])
    heights = spread([0.5 + i / 1000 for i in range(25)], 1 / 25)
    assert all(b - a >= 1 / 25 - 1e-9 for a, b in pairwise(heights))
    assert heights[0] >= 0
    assert heights[-1] <= 1


def test_210_nets_differ_by_colour_marker_or_dash_and_neighbours_by_each() -> None:
    styles = [Style.of(number) for number in range(210)]
    assert len({*styles, Style.of(None)}) == 211
    for one, other in pairwise(styles):
        assert one.color != other.color
        assert one.marker != other.marker
        assert one.dash != other.dash


@pytest.mark.drawn
def test_a_picture_of_25_rows_has_room_for_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    boxes: list[Any] = []
    save = Figure.savefig

    def saved(figure: Any, *args: Any, **kwargs: Any) -> None:
        save(figure, *args, **kwargs)
        left, right = figure.axes
        texts = (left.get_yticklabels(), right.texts)
        boxes.extend([Text.get_window_extent(text) for text in names] for names in texts)
        assert all(box.x0 >= 0 and box.x1 <= figure.bbox.width for box in boxes[0] + boxes[1])

    monkeypatch.setattr(Figure, "savefig", saved)
    students = {f"attentiontransfer{i}": [student(370 + i % 3), student(371)] for i in range(25)}
    picture(combine(header(2), [teacher()] * 2, students, [1.0] * 2))
    for texts in boxes:
        ordered = sorted(texts, key=lambda box: box.y0)
        assert len(ordered) == 25
        assert all(upper.y0 >= lower.y0 + 0.8 * lower.height for lower, upper in pairwise(ordered))
