"""results.json, its statistics, its table, its picture; and files that are never half written.

tests/frozen/results has whole files and pages of runs.
"""

import io
import json
import math
import subprocess
import sys
from dataclasses import replace

import matplotlib.image
import numpy as np
import pytest

from apprentice.errors import BadInput
from harness.reports import samples
from harness.reports.bakeoff.notes import notes, one_class
from harness.reports.bakeoff.plots import picture
from harness.reports.bakeoff.save import save_results
from harness.reports.bakeoff.table import table
from harness.reports.bakeoff.texts import markdown, text
from harness.reports.combine import combine
from harness.reports.conclusions import conclude
from harness.reports.measures import COST
from harness.reports.results import Results, load_results
from harness.reports.settings import settings
from harness.reports.tables import Table, join_words, short
from harness.reports.uncertainty import lead_by_chance, paired_interval, t_interval
from harness.runs.files import atomic, write_bytes, write_json, write_text
from harness.runs.records import FORMAT
from lit_modules.tasks import ACCURACY
from tests.bake_off_facts import CE, FAILED, HINT, KD, TEST, header, results, student, teacher
from tests.grids import mostly_slow

NOTHING = {"mean": None, "low": None, "high": None}


# The structure


def test_the_keys_of_results_json():
    found = results().to_json()
    assert list(found) == [
        *("format", "experiment", "data", "hardware", "versions", "config", "free", "seeds", "fingerprint", "commits"),
        *("metric", "students_fit_seconds", "classes", "teacher", "students"),
    ]
    assert found["metric"] == {"name": "test_acc", "higher_is_better": True}
    common = {"parameters", "epochs", "trained_epochs", "test_acc", "test_correct", "step_ms", "train_flops"}
    assert set(found["teacher"]) == common | {"nets", "max_epochs", "fit_seconds"}
    for entry in found["students"].values():
        assert set(entry) == common | {"objective", "delta_vs_ce", "delta_vs_ce_corrected", "failed"}
    kd, taught = found["students"]["kd"], found["teacher"]
    assert (kd["test_correct"], kd["test_acc"]) == ([*KD], [correct / TEST for correct in KD])
    assert (kd["parameters"], kd["failed"]) == (267738, [None] * 3)
    assert (taught["nets"], taught["fit_seconds"], taught["train_flops"]) == (3, [4.5] * 3, 3_200_000_000_000)


def test_step_is_the_median_of_the_seeds():
    found = results(kd=[student(9, step_ms=ms) for ms in (3.0, 50.0, 4.0)])
    assert found.students["kd"].figures["step_ms"] == 4.0


KD_ALONE = {"kd": [student(c) for c in KD]}
DELTAS = {
    "one seed": (results(1), "kd", {"mean": pytest.approx((KD[0] - CE[0]) / TEST), "low": None, "high": None}),
    "no ce": (results(**KD_ALONE), "kd", NOTHING),
    "ce itself": (results(), "ce", {"mean": 0, "low": None, "high": None}),
}


@pytest.mark.parametrize("case", DELTAS)
def test_a_difference_is_to_ce(case):
    found, name, expected = DELTAS[case]
    assert found.students[name].delta_vs_ce == expected


def test_failed_seeds_are_null_and_left_out_of_the_pairs():
    found = results(
        ce=[student(CE[0]), student(CE[1], FAILED), student(CE[2])],
        kd=[student(KD[0]), student(KD[1]), student(KD[2])],
        hint=[student(HINT[0], FAILED), student(HINT[1]), student(HINT[2])],
        cosine=[student(0, FAILED)] * 3,
    ).to_json()["students"]
    assert found["hint"]["test_acc"] == [None, HINT[1] / TEST, HINT[2] / TEST]
    assert found["hint"]["test_correct"] == [None, *HINT[1:]]
    assert found["hint"]["failed"] == [FAILED, None, None]
    assert found["kd"]["delta_vs_ce"] == paired_interval([(KD[i] - CE[i]) / TEST for i in (0, 2)])
    assert found["hint"]["delta_vs_ce"] == {"mean": (HINT[2] - CE[2]) / TEST, "low": None, "high": None}
    assert found["cosine"]["delta_vs_ce"] == NOTHING
    assert found["cosine"]["train_flops"] is None


def test_a_loaded_teacher_has_no_times():
    loaded = teacher(fit_seconds=None, step_ms=None, train_flops=None)
    found = combine(header(2), [loaded] * 2, {"ce": [student(1)] * 2}, [1.0, 2.0]).to_json()["teacher"]
    assert (found["fit_seconds"], found["step_ms"], found["train_flops"]) == ([None, None], None, None)
    assert found["test_acc"] == [390 / TEST] * 2


def test_one_teacher_for_all_seeds_is_told_as_one_net():
    loaded = teacher(fit_seconds=None, step_ms=None, train_flops=None)
    students = {"ce": [student(CE[0]), student(CE[1])]}
    found = combine(header(2), [loaded] * 2, students, [1.0, 2.0])
    assert found.teacher.nets == 1
    scores = {row[0]: row[3] for row in table(found).rows}
    assert scores["teacher"] == "97.50"
    assert "±" in scores["ce"]
    assert "teacher: one net, tested once, which taught with every seed." in notes(found)
    several = header(2)
    several.config["teacher_ckpt"] = "teacher-{seed}.pt"
    each = combine(several, [loaded] * 2, students, [1.0, 2.0])
    assert not any(note.startswith("teacher") for note in notes(each))


def test_an_entry_a_seed_is_needed():
    with pytest.raises(ValueError, match="kd: expected 3 entries, one a seed, got 2"):
        results(kd=[student(1)] * 2)


# Words


SEEN = (
    "seeds detect a difference of 3.92 points in 4 of 5 cases (1.70 to 20.51, as 3 seeds tell the noise no better); "
    "to detect a third of that takes 9 seeds."
)

NOT_TOGETHER = (
    "With 3 seeds, kd (+3.00) and t8 (+2.97) differ from ce in a comparison alone, but can't be told apart from it "
    "once all 2 comparisons are corrected for. The table's intervals are of single comparisons; corrected for all 2 "
    "(Holm): kd +3.00 [-0.58, +6.58], t8 +2.97 [-0.80, +6.73]."
)


@pytest.mark.parametrize(("differences", "said"), [
    ({}, ""),
    ({"kd": []}, ""),
    ({"kd": [0.01]}, "One seed gives no interval: nothing here says that any other row differs from ce"),
    ({"kd": [0.02, 0.021, 0.022]}, "With 3 seeds, kd (+2.10) is better than ce beyond the noise between seeds."),
    ({"kd": [-0.02, -0.021, -0.022]}, "kd (-2.10) is worse than ce beyond the noise"),
    ({"kd": [0.0, 0.0]}, "kd can't be told apart from ce"),
    ({"kd": [0.01, 0.01]}, "kd differed by the same on each seed, which is no measure of noise"),
    ({"kd": [0.02, 0.021, 0.022], "t8": [0.1, -0.1]},
     "better than ce beyond the noise between seeds; t8 can't be told"),
    ({"kd": [0.02, -0.021, 0.022], "t8": [0.1, -0.1]}, "With 2 to 3 seeds, kd and t8 can't"),
    ({"kd": [0.02, -0.021], "t8": [0.1, -0.1]},
     " The table's intervals are of single comparisons; corrected for all 2 (Holm): kd -0.05 [-52.23, +52.13], t8"),
    ({f"m{i}": [0.1, -0.1] for i in range(7)}, "single comparisons; corrected for all 7 (Holm): in results.md."),
    ({"kd": [0.1, 0.1], "t8": [0.1, 0.1]}, "With 2 seeds, kd and t8 differed by the same on each seed"),
    # p is 0.035 and 0.039: each alone differs, but not the two together
    ({"kd": [0.02, 0.03, 0.04], "t8": [0.019, 0.03, 0.04]}, NOT_TOGETHER),
    ({"kd": [0.02, 0.03, 0.04], "t8": [0.02, -0.02, 0.01]},
     "t8 can't be told apart from ce; kd (+3.00) differs from it in a comparison alone, but can't be told apart"),
    # by a deviation of 0.01, scipy's noncentral t finds 3.26 points, and a third of it needs 9 or 10 seeds; three
    # seeds that show 0.01 come from deviations of 0.52 to 6.28 times that, as often above as below 1.20 times
    ({"kd": [0.02, 0.03, 0.04]}, f" 3 {SEEN}"),
    ({"kd": [0.02, 0.03, 0.04], "t8": [0.02, 0.03, 0.04]}, f" In a single comparison, 3 {SEEN}"),
    ({"kd": [0.3, 0.1, 0.2]}, " 39.21 points in 4 of 5 cases (16.99 to 100.00, as 3 seeds tell"),
    ({"kd": [0.02, -0.021], "t8": [0.1]}, "t8 had one seed to compare, so no interval"),
])  # fmt: skip
def test_verdict_says_what_the_intervals_support(differences, said):
    assert said in conclude("ce", differences)


def test_it_is_said_after_how_many_epochs_a_limit_of_time_ended_nets():
    rows = {
        name: [student(count, trained_epochs=epochs) for count, epochs in zip(CE, of, strict=True)]
        for name, of in {"ce": (3.25, 4, 10), "kd": (3.25, 4, 10), "hint": (10, 10, 10)}.items()
    }
    rows["bad"] = [student(0, FAILED, trained_epochs=2), *rows["hint"][1:]]
    taught = [teacher(trained_epochs=epochs, max_epochs=20) for epochs in (20, 7.125, 20)]
    found = combine(header(), taught, rows, [12.0] * 3)
    assert found.students["ce"].trained_epochs == [3.25, 4, 10]
    assert found.teacher.trained_epochs == [20, 7.125, 20]
    said = (
        "Training ended early (by early_stopping, the Trainer's max_time or max_steps, or a "
        "callback), seed by seed: teacher after 20, 7.125 and 20 of 20 epochs; ce and kd after 3.25, 4 and 10 of 10 "
        "epochs."
    )
    assert said in notes(found)
    assert said in markdown(found)
    assert "ended early" not in " ".join(notes(results()))


def test_two_seeds_do_not_say_what_they_can_show():
    assert conclude("ce", {"kd": [0.02, -0.03]}) == "With 2 seeds, kd can't be told apart from ce."


def test_a_sorted_table_says_how_far_the_first_of_equal_ones_would_be_ahead():
    rows = {"ce": CE, "kd": KD, "hint": HINT, "bad": (None, 300, 310)}
    students = {name: [student(count, None if count else FAILED) for count in of] for name, of in rows.items()}
    plain = combine(header(), [teacher()] * 3, students, [12.0] * 3)
    ranked = replace(plain, config={**plain.config, "zoo": True})
    ahead = 100 * lead_by_chance(np.array([CE, KD, HINT]) / TEST)  # of those that all seeds have
    said = f"Sorted by accuracy: were these 3 students equal, the first would be about {ahead:.2f} points better than "
    assert said in " ".join(notes(ranked))
    assert "Sorted" not in " ".join(notes(plain))
    assert "Sorted" not in " ".join(notes(replace(results(1), config=ranked.config)))


def test_terminal_table_is_aligned_and_narrow():
    long = "Sum(" + "Hinton(temperature=2), " * 4 + ")"
    lines = text(results(**{name: [student(c, objective=long) for c in KD] for name in ("ce", "k" * 60)})).splitlines()
    assert max(map(len, lines)) <= 110
    body = lines[: lines.index("")]
    right = [line.rindex("0.410") for line in body if "0.410" in line]
    assert (len(right), len(set(right))) == (2, 1)
    assert "k" * 60 in "".join(line.split("  ")[0].strip() for line in body)  # wrapped, not cut


def test_failures_are_said_in_words():
    hint = [student(1, FAILED), student(2), student(3)]
    page = text(results(ce=[student(c) for c in CE], kd=[student(1, FAILED)] * 3, hint=hint))
    assert "kd *" in page
    assert "it has no figures" in page
    assert "* hint: the loss stopped being finite with seed 0 (term kl, step 120); its figures are over" in page


def test_nets_that_predict_one_class_are_named():
    truth, one = samples.pack_classes(np.arange(TEST) % 10), samples.pack_classes(np.full(TEST, 3))
    found, several = results(), samples.pack_classes(np.arange(TEST) % 7)
    predicted = {"ce": [one] * 3, "kd": [several, one, one], "hint": [several] * 3}
    students = {n: replace(of, samples={"test_predicted": predicted[n]}) for n, of in found.students.items()}
    found = replace(found, students=students, teacher=replace(found.teacher, sampled={"test_labels": truth}))
    (said,) = one_class(found)
    assert said == (
        "One class predicted for all test samples: ce with every seed; kd with seed 1 and seed 2; their accuracy is "
        "that class's share of the test, and compares no methods."
    )
    assert one_class(replace(found, students={"hint": students["hint"]})) == []


def test_one_seed_makes_no_claim():
    page = text(results(1))
    assert "±" not in page
    assert "[" not in page
    assert "One seed gives no interval" in page


def test_header_names_all_settings_and_the_commits():
    found = replace(results(), commits=["ab", None, "cd-dirty"])
    assert markdown(found).startswith("""\
# kd on Digits

- Data: Digits: 1,257 train, 140 validation, 400 test samples
- Seeds: 0, 1, 2
- Settings: data Digits(batch_size=128, seed=0, root=a); optimizer Adam(lr=0.001); trainer.max_epochs 10
- Hardware: cores 2
- Versions: torch 2.15.0
- Commit: ab, then unknown, then cd-dirty

| variant |""")


def test_settings_leave_out_what_is_off_and_what_moves_nothing():
    both = {"class_path": "x.Sum", "init_args": {"objectives": [{"class_path": "x.Hinton", "init_args": {"t": 0}}]}}
    trainer = {"max_epochs": -1, "max_steps": 9, "accumulate_grad_batches": 1, "devices": 2, "num_nodes": 1}
    config = {
        "model": {"lr": 0.1, "betas": [0.9, 0.99], "fused": False}, "objective": both, "teacher": None, "out": "x",
        "data": {"class_path": "Digits"}, "trainer": {**trainer, "limit_train_batches": 0.5}, "teacher_cache_mb": 9,
        "seeds": [1], "calibration_size": 512,
    }  # fmt: skip
    assert settings(config, {"out", "trainer.num_nodes"}) == [
        "data Digits", "model(lr=0.1, betas=[0.9, 0.99])", "trainer.max_steps 9", "trainer.devices 2",
        "objective Sum(objectives=[Hinton(t=0)])", "calibration_size 512", "trainer.limit_train_batches 0.5",
    ]  # fmt: skip


def test_settings_bear_any_configuration():
    assert settings({}, ()) == []
    config = {"teacher": None, "data": "Digits", "trainer": {"precision": "64-true"}}
    assert settings(config, ()) == ["data Digits", "trainer.precision 64-true"]


def test_numbers_and_words():
    numbers = [short(x) for x in (None, 0.00012, 0.0123, 1.0, 99.996, 12345.6)]
    assert numbers == ["—", "0.00012", "0.0123", "1.00", "100", "12,346"]
    assert [COST.unit([x])[1][0] for x in (None, 5e8, 5e9, 5e12, 5e15)] == ["M", "M", "G", "T", "P"]
    assert COST.unit([5e9])[1] == "GFLOPs"
    assert ACCURACY.difference({"mean": -1e-9, "low": None, "high": None}) == "0.00"
    assert (join_words(["a"]), join_words(["a", "b", "c"])) == ("a", "a, b and c")
    assert "a\\|b" in Table(["x"], [["a|b"]]).markdown()


# Pictures


CASES = {
    "usual": results(),
    "one seed": results(1),
    "failed": results(ce=[student(c) for c in CE], kd=[student(1, FAILED)] * 3),
    "all failed": results(ce=[student(1, FAILED)] * 3),
    "ten": results(**{f"attention_transfer_{i}": [student(c + i) for c in CE] for i in range(10)}),
    "all equal": results(a=[student(TEST)] * 3, b=[student(TEST)] * 3),
    "no costs": results(a=[student(300, train_flops=None, step_ms=None)] * 3),
    "steps only": results(a=[student(300, train_flops=None)] * 3),
    "odd names": results(**{"$a_b$^": [student(300)] * 3, "学生": [student(301)] * 3}),
}


@pytest.mark.drawn
@pytest.mark.parametrize("case", mostly_slow(CASES, "failed", "odd names", "no costs"))
def test_picture_is_drawn(case):
    image = matplotlib.image.imread(io.BytesIO(picture(CASES[case])), format="png")
    assert image.shape[1] > 1000
    assert image.std() > 0.01


@pytest.mark.slow
def test_importing_and_drawing_leave_matplotlib_alone():
    script = """if True:
        import harness.reports.figures, harness.reports.bakeoff.page
        import matplotlib
        names = set(matplotlib.rcParams) - {"backend"}  # reading which would load pyplot
        before = {name: matplotlib.rcParams[name] for name in names}
        from harness.reports.charts import Dot, metric_picture
        metric_picture([Dot("ce", [0.9, 0.8], 1.0, 0)], "cost")
        assert {name: matplotlib.rcParams[name] for name in names} == before
    """
    subprocess.run([sys.executable, "-W", "error", "-c", script], check=True)


# Files


def test_save_and_load(tmp_path):
    found = results()
    save_results(tmp_path, found)
    facts = json.loads(json.dumps(found.to_json()))
    assert {"format": 1, **load_results(tmp_path)} == facts
    assert Results.read(facts).to_json() == facts
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["report.html", "results.json", "results.md", "results.png"]


def test_results_json_is_written_last(tmp_path):
    with pytest.raises(TypeError):
        save_results(tmp_path, replace(results(), config={"x": object()}))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "results.md", "results.png"]


def test_json_has_null_where_python_has_nan(tmp_path):
    write_json(tmp_path / "x.json", {"a": [math.nan, 1.5, (math.inf,)], "b": {"c": -math.inf, "d": None, "e": "é"}})
    text = (tmp_path / "x.json").read_text("utf-8")
    assert json.loads(text) == {"a": [None, 1.5, [None]], "b": {"c": None, "d": None, "e": "é"}}


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_failing_write_leaves_the_old_file(tmp_path, error):
    path = tmp_path / "weights.pt"
    write_bytes(path, b"old")

    def fail():
        with atomic(path) as temporary:
            assert temporary.parent == tmp_path
            temporary.write_bytes(b"ne")
            raise error

    with pytest.raises(error):
        fail()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_failing_replacement_leaves_no_temporary_file(tmp_path):
    (tmp_path / "x").mkdir()  # a file can't replace a folder
    with pytest.raises(OSError, match="x"):
        write_text(tmp_path / "x", "new")
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_what_a_killed_write_left_is_reused(tmp_path):
    with atomic(tmp_path / "x") as temporary:
        pass_by = temporary
        temporary.write_text("first")
    pass_by.write_text("half of a longer text")
    write_text(tmp_path / "x", "new")
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    assert (tmp_path / "x").read_text() == "new"


def test_missing_folder_is_the_systems_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        write_text(tmp_path / "no" / "x", "new")


UNREADABLE = "a readable results.json of our experiments in it"


@pytest.mark.parametrize(("content", "said"), [
    (None, "there is no results.json in it"), ("{", UNREADABLE), ("", UNREADABLE), ("[1]", UNREADABLE),
    ('{"experiment": NaN}', "it does not name its experiment"), ('{"a": 1}', "KeyError: 'experiment'"),
    ('{"experiment": "kd"}', "format 1, which this version writes; it has no number"),
    ('{"experiment": "kd", "format": 2}', "format 1, which this version writes; it has 2"),
])  # fmt: skip
def test_folders_of_others_are_refused(tmp_path, content, said):
    if content is not None:
        (tmp_path / "results.json").write_text(content)
    with pytest.raises(BadInput, match=f"^run {tmp_path}: expected .*") as caught:
        load_results(tmp_path)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("run", "said"), [
    ("unfinished", "unfinished, go on with it by `--out .*/unfinished --resume true`"),
    ("no", "no such folder"), ("file", "this is a file"), ("", r"did you mean .*/t4"),
])  # fmt: skip
def test_what_is_no_run_is_told(tmp_path, run, said):
    for name in ("unfinished", "t4"):
        (tmp_path / name).mkdir()
    (tmp_path / "unfinished" / "config.yaml").touch()
    (tmp_path / "file").touch()
    write_json(tmp_path / "t4" / "results.json", {"format": FORMAT, "experiment": "pipeline", "rows": []})
    with pytest.raises(BadInput, match=said):
        load_results(tmp_path / run)
    assert load_results(tmp_path / "t4")["rows"] == []


def test_no_warning_without_spread():
    assert t_interval([0.5] * 4) == {"mean": 0.5, "low": None, "high": None}
