"""experiments/compare.py: finished runs in one table."""

import itertools
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import datamodules
from experiments.compare import main
from harness.reports.combine import combine
from harness.reports.results import Results
from harness.reports.uncertainty import paired_interval
from harness.runs.files import write_json
from harness.runs.records import FORMAT, FitRecord, Header, NetRecord
from harness.studies.compare import compare, load_runs, text
from harness.studies.compare.comparison import CONFOUNDED
from harness.studies.compare.page import markdown
from lit_modules.tasks import BITS
from tests.bake_off_facts import CE, FAILED, KD, TEST, gpt, header, results, student, teacher

ROOT = Path(__file__).parents[2]


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """A function that leaves a run in a folder, given how its results differ from the usual ones."""
    monkeypatch.chdir(tmp_path)

    def leave(name, found=None, **changes):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        facts = found or results()
        facts = facts.to_json() if isinstance(facts, Results) else facts
        write_json(folder / "results.json", {**facts, **changes})
        return str(folder)

    return leave


def rows(*folders):
    found = compare(load_runs(folders))
    return {row["name"]: row for row in found.to_json()["rows"]}, found.notes


def test_end_to_end(runs, tmp_path):
    for name in ("t4", "t8"):
        runs(name)
    command = [sys.executable, "-W", "error", ROOT / "experiments" / "compare.py", "t4", "--out", "both", "t8"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, encoding="utf-8", check=False)
    assert (done.returncode, done.stderr) == (0, "")
    shown = done.stdout
    lines = [line.split("  ")[0] for line in shown.partition("\n\n")[0].splitlines()]
    assert lines[2:] == ["t4/ce", "t4/kd", "t4/hint", "t8/ce", "t8/kd", "t8/hint"]
    assert "Saved report.html, compare.md, .png and .json in both" in shown
    left = sorted(path.name for path in (tmp_path / "both").iterdir())
    assert left == ["compare.json", "compare.md", "compare.png", "report.html"]
    assert "compare.py t4 --out both t8\n</code>" in (tmp_path / "both" / "report.html").read_text()
    assert max(map(len, shown.splitlines())) <= 110
    saved = json.loads((tmp_path / "both" / "compare.json").read_text())
    assert saved["baseline"] == "t4/ce"
    assert [run["name"] for run in saved["runs"]] == ["t4", "t8"]


def test_differences_are_to_the_first_runs_ce(runs):
    other = results(kd=[student(c) for c in KD])
    found, notes = rows(runs("t4"), runs("t8", other))
    assert found["t8/kd"]["delta"] == paired_interval([(k - c) / TEST for k, c in zip(KD, CE, strict=True)])
    assert found["t4/ce"]["delta"] == {"mean": 0, "low": None, "high": None}
    assert any("t8/kd (+2.00)" in note for note in notes)


def test_differences_are_paired_over_common_seeds_and_by_seed(runs):
    shuffled = replace(results(kd=[student(KD[2]), student(380), student(KD[0])]), seeds=[2, 7, 0])
    found, notes = rows(runs("t4"), runs("t8", shuffled))
    assert found["t8/kd"]["delta"] == paired_interval([(KD[0] - CE[0]) / TEST, (KD[2] - CE[2]) / TEST])
    assert any("in common with the first" in note for note in notes)


def test_failed_seeds_are_left_out_and_named(runs):
    other = results(kd=[student(1, FAILED), *(student(c) for c in KD[1:])])
    found, notes = rows(runs("t4"), runs("t8", other))
    assert found["t8/kd"]["delta"] == paired_interval([(KD[i] - CE[i]) / TEST for i in (1, 2)])
    assert any(note.startswith("* t8/kd: the loss stopped being finite with seed 0") for note in notes)


@pytest.mark.parametrize(("changes", "said"), [
    ({"data": {**header().data, "train": 900}}, "other data (train 900, not 1257)"),
    ({"data": {**header().data, "name": "MNIST"}}, "other data (name MNIST, not Digits)"),
    ({"classes": ["cat", "fish"]}, "other data (of other classes)"),
    ({"fingerprint": {"train": "a", "test": "b"}}, "other data (other samples in train and test)"),
    ({"seeds": [7, 8, 9]}, "no seed in common (7, 8 and 9)"),
])  # fmt: skip
def test_what_is_not_comparable_says_why(runs, changes, said):
    found, notes = rows(runs("t4", classes=["cat", "dog"]), runs("t8", **changes))
    assert found["t8/kd"]["delta"] == {"mean": None, "low": None, "high": None}
    assert found["t4/kd"]["delta"]["mean"] is not None
    assert any(note.startswith("t8 is not compared with t4/ce: ") and said in note for note in notes)


def test_settings_that_choose_no_samples_are_comparable(runs):
    other = header(batch_size=64, augment=True, root="elsewhere").config
    found, _ = rows(runs("t4"), runs("t8", config=other), runs("bare", config=header().config))
    assert found["t8/kd"]["delta"]["low"] is not None


def test_limits_and_sizes_are_told_by_the_samples_that_they_leave(runs):
    limits = {"trainer__limit_test_batches": 1, "trainer__limit_val_batches": 1, "data__test_size": 300}
    config = configured(trainer__num_sanity_val_steps=0, **limits)
    of_part = {**header().data, "test": 128}
    found, notes = rows(runs("t4"), runs("seen", config=config), runs("part", config=config, data=of_part))
    assert found["seen/kd"]["delta"]["low"] is not None
    assert found["part/kd"]["delta"]["low"] is None
    assert not any("differ in settings" in note for note in notes)


def configured(**changes):
    """Another configuration: `a__b=1` is `a.b`."""
    config = header().config
    for name, value in changes.items():
        *path, last = name.split("__")
        inner = config
        for key in path:
            inner = inner.setdefault(key, {})
            inner = inner.get("init_args", inner)
        inner[last] = value
    return config


SGD = {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1, "momentum": 0.9}}
OTHERS = {
    "epochs": ({"trainer__max_epochs": 20}, "trainer.max_epochs"),
    "batch size": ({"data__batch_size": 64, "data__augment": True}, "data.batch_size, data.augment"),
    "rate": ({"optimizer__lr": 0.01}, "optimizer.lr"),
    "optimizer": ({"optimizer": SGD}, "optimizer"),
    "limit": ({"trainer__limit_train_batches": 0.5}, "trainer.limit_train_batches"),
    "precision": ({"trainer__precision": "bf16-mixed"}, "trainer.precision"),
    "teacher": ({"teacher_ckpt": "w.pt", "exact": 8}, "teacher_ckpt, exact"),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_runs_with_other_settings_have_intervals_and_no_verdict(runs, capsys, kind):
    changes, flags = OTHERS[kind]
    found, notes = rows(runs("t4"), runs("t8", config=configured(**changes)), runs("t9"))
    assert found["t8/kd"]["delta"] == found["t9/kd"]["delta"]
    assert found["t8/kd"]["delta"]["low"] > 0
    assert f"t8 and t4 differ in settings: {flags}. {CONFOUNDED}" in notes
    judged = next(note for note in notes if "beyond the noise" in note)
    assert [name in judged for name in ("t4/kd", "t9/kd", "t8")] == [True, True, False]
    main(["t4", "t8", "--out", "both"])
    assert "differ in settings" in capsys.readouterr().out
    assert "differ in settings" in Path("both/compare.md").read_text()
    assert ", ".join(json.loads(Path("both/compare.json").read_text())["runs"][1]["other_settings"]) == flags


def test_methods_and_where_a_run_ran_are_no_settings(runs):
    ran = {"trainer__devices": 8, "trainer__strategy": {"class_path": "x.DDP", "init_args": {"timeout": 9}}}
    ran |= {"trainer__logger": False, "out": "x", "checkpoint_every": 5.0, "only": ["kd"], "teacher_cache_mb": 0}
    method = {"kd": {"class_path": "objectives.Hinton", "init_args": {"temperature": 8.0}}}
    config = configured(**ran, variants=method, scheduler=None, data__num_workers=3, seeds=[0, 1, 2])
    found, notes = rows(runs("t4"), runs("t8", config=config), runs("bare", config={}))
    assert found["t8/kd"]["delta"]["low"] > 0
    assert not any(note.startswith("t8 and t4") for note in notes)
    assert "t8/kd (+2.00)" in next(note for note in notes if "beyond the noise" in note)


def test_nets_and_tokens_are_known_by_content_wherever_they_lie(runs):
    """Of a run whose teacher's folder has moved there is a verdict; of one whose teacher is another, none."""

    def loaded(place, rope=1.0, content="aa"):
        config = configured(
            data__root=place, data__tokenizer=place, teacher={"class_path": "x.Net", "init_args": {"name": place}}
        )
        origin = {"configuration": {"model": {"rope": rope}}, "content": content}
        return {"config": config, "origins": {"teacher": origin}, "fingerprint": {"train": "same"}}

    first, *others = (
        runs("a", **loaded("a")), runs("moved", **loaded("b")), runs("rope", **loaded("a", 2.0)),
        runs("weights", **loaded("a", content="bb")),
    )  # fmt: skip
    found, notes = rows(first, *others)
    assert all(found[f"{name}/kd"]["delta"]["low"] is not None for name in ("moved", "rope", "weights"))
    assert not any(note.startswith("moved ") for note in notes)
    assert f"rope and a differ in settings: teacher: rope. {CONFOUNDED}" in notes
    assert f"weights and a differ in settings: teacher: the hash of its content. {CONFOUNDED}" in notes
    told = {one.setting: one.values for one in compare(load_runs([first, others[1]])).differences}
    assert told["teacher: rope"] == {"a": "1.0", "rope": "2.0"}


def differing(*folders):
    """What is printed below the notes and above the settings."""
    page = text(compare(load_runs(folders)))
    return page[page.index("\n\n", page.index("\n\n") + 1) + 2 : page.index("\n\nSettings:\n")]


def test_what_differs_is_told_with_the_value_in_each_run(runs):
    changes = configured(trainer__max_epochs=20, trainer__devices=8, data__root="b", data__augment=True)
    changes["variants"]["kd"]["init_args"]["temperature"] = 8.0
    changes["variants"]["absent"] = {"class_path": "x.Y", "init_args": {}}
    versions, machine = {"torch": "2.16.0", "new": "1"}, {"cores": 4, "gpus": [], "memory_gib": 9.0}
    t4 = runs("t4", commits=["ab" * 20, "cd" * 20 + "-dirty"])
    t8 = runs("t8", config=changes, seeds=[0, 1, 5], versions=versions, hardware=machine, commits=[None])
    assert (
        differing(t4, t8)
        == """\
What differs and may move results:

setting                  t4                                     t8
-----------------------  -------------------------------------  -------
variants.kd.temperature  2.0                                    8.0
trainer.max_epochs       10                                     20
data.augment             —                                      True
seeds                    0, 1, 2                                0, 1, 5
commit                   abababababab, then cdcdcdcdcdcd-dirty  unknown
torch                    2.15.0                                 2.16.0
new                      —                                      1

What differs and moves nothing but times, and figures by rounding:

setting          t4  t8
---------------  --  --
data.root        a   b
trainer.devices  —   8
cores            2   4"""
    )


def test_where_a_class_differs_its_options_are_told_with_it(runs):
    assert (
        differing(runs("a"), runs("b", config=configured(optimizer=SGD, scheduler=SGD)))
        == """\
What differs and may move results:

setting    a               b
---------  --------------  -------------------------
optimizer  Adam(lr=0.001)  SGD(lr=0.1, momentum=0.9)
scheduler  —               SGD(lr=0.1, momentum=0.9)"""
    )


def test_many_runs_have_a_line_for_each_value(runs):
    folders = [runs(name, config=configured(optimizer__lr=0.1 if name == "e" else 0.001)) for name in "abcde"]
    folders += [runs("f", config=configured(optimizer__lr=0.2, trainer__precision="64-true"))]
    assert (
        differing(*folders)
        == """\
What differs and may move results:

setting            value    runs
-----------------  -------  ----------
optimizer.lr       0.001    the others
                   0.1      e
                   0.2      f
trainer.precision  —        the others
                   64-true  f"""
    )


def test_equal_settings_are_told_so(runs):
    same = "Settings are the same but for the folder."
    assert differing(runs("t4"), runs("t8", config=configured(out="x", resume=True, data__seed=0.0))) == same
    assert same not in text(compare(load_runs(["t4"])))


def test_settings_that_a_resumed_run_has_read_are_the_same(runs):
    a, b = (runs(name, config=configured(optimizer__eps=eps)) for name, eps in (("a", 0), ("b", 0.0)))
    found = compare(load_runs([a, b]))
    assert found.differences == []
    assert list(found.settings) == ["all runs"]
    assert "optimizer Adam(lr=0.001, eps=0)" in found.settings["all runs"]


def test_one_batch_is_not_all_batches(runs):
    one, whole = (configured(trainer__limit_train_batches=limit) for limit in (1, 1.0))
    assert "trainer.limit_train_batches  1  1.0" in differing(runs("a", config=one), runs("b", config=whole))
    assert f"b and a differ in settings: trainer.limit_train_batches. {CONFOUNDED}" in rows("a", "b")[1]


def test_when_validation_runs_matters_to_callbacks_only(runs):
    often = configured(trainer__val_check_interval=5)
    first, second = ({**config, "trainer": {**config["trainer"]}} for config in (often, configured()))
    for config in (first, second):
        config["trainer"]["callbacks"] = [{"class_path": "x.EarlyStopping", "init_args": {}}]
    assert differing(runs("a"), runs("b", config=often)).startswith("What differs and moves nothing but times")
    assert not rows("a", "b")[1][0].startswith("b and a differ")
    assert differing(runs("c", config=second), runs("d", config=first)).startswith("What differs and may move results")
    assert f"d and c differ in settings: trainer.val_check_interval. {CONFOUNDED}" in rows("c", "d")[1]


def test_settings_are_told_of_all_runs_of_one_and_of_each_student(runs):
    warm = configured(trainer__max_epochs=20)
    warm["variants"]["kd"]["init_args"]["temperature"] = 8.0
    folders = runs("t4"), runs("ce", config=configured(trainer__max_epochs=20)), runs("t8", config=warm)
    found = compare(load_runs(folders))
    assert f"ce, t8 and t4 differ in settings: trainer.max_epochs. {CONFOUNDED}" in found.notes
    assert text(found).endswith("""\


Settings:
all runs: data Digits(batch_size=128, seed=0, root=a); optimizer Adam(lr=0.001)
t4: trainer.max_epochs 10
ce: trainer.max_epochs 20
t8: trainer.max_epochs 20

Objectives:
ce: CrossEntropy
t4/kd and ce/kd: Hinton(temperature=2.0)
t8/kd: Hinton(temperature=8.0)
hint: Hinton(temperature=2)""")
    assert markdown(found).endswith("""\

Settings:

- all runs: data Digits(batch_size=128, seed=0, root=a); optimizer Adam(lr=0.001)
- t4: trainer.max_epochs 10
- ce: trainer.max_epochs 20
- t8: trainer.max_epochs 20

Objectives:

- ce: CrossEntropy
- t4/kd and ce/kd: Hinton(temperature=2.0)
- t8/kd: Hinton(temperature=8.0)
- hint: Hinton(temperature=2)

![accuracy](compare.png)
""")


# Runs of gpt.py


def test_language_models_are_compared_with_the_first(runs, capsys):
    main([runs("a", gpt([3.0, 3.1, 2.9])), runs("b", gpt([2.8, 2.9, 2.71], net__num_layers=6)), "--out", "x"])
    assert (
        capsys.readouterr().out
        == """\
run/student  data      seeds  bits per char         Δ to a/gpt, bits  parameters  step, ms  cost, GFLOPs
-----------  --------  -----  -------------  -----------------------  ----------  --------  ------------
a/gpt        Text 900      3  3.000 ± 0.100                        —      81,472      32.5           404
b/gpt        Text 900      3  2.803 ± 0.095  -0.197 [-0.211, -0.182]      81,472      32.5           404

Bits per character: mean ± standard deviation over the seeds, on 100 test tokens. Δ: paired difference to
a/gpt, with its 95 % interval.
With 3 seeds, b/gpt (-0.197) is better than a/gpt beyond the noise between seeds. 3 seeds detect a difference
of 0.023 bits in 4 of 5 cases (0.010 to 0.118, as 3 seeds tell the noise no better); to detect a third of that
takes 9 seeds.

What differs and may move results:

setting         a  b
--------------  -  -
net.num_layers  4  6

Settings:
all runs: data(block_size=64, batch_size=12); model(lr=0.003); trainer.max_steps 100; temperature 0.8
a: net GPT(num_layers=4)
b: net GPT(num_layers=6)

Objectives:
a/gpt: GPT(num_layers=4)
b/gpt: GPT(num_layers=6)

Saved report.html, compare.md, .png and .json in x
"""
    )
    assert Path("x/compare.png").stat().st_size


def test_language_models_trained_otherwise_get_no_verdict(runs):
    longer = runs("b", gpt([2.8, 2.9], trainer__max_steps=200, temperature=0.1, data__block_size=32))
    other = runs("c", gpt([2.8, 2.9], data__path="other"), fingerprint={"train": "other"})
    found, notes = rows(runs("a", gpt([3.0, 3.1])), longer, other)
    assert found["b/gpt"]["delta"]["mean"] == -0.2
    assert found["c/gpt"]["delta"]["mean"] is None
    assert notes == [
        "c is not compared with a/gpt: other data (other samples in train).",
        f"b and a differ in settings: data.block_size, trainer.max_steps. {CONFOUNDED}",
    ]


def test_students_on_text_and_language_models_are_in_one_table(runs):
    facts = {"objective": "CrossEntropy", "parameters": 9, "failed": None, "epochs": []}
    facts |= {"step_ms": None, "train_flops": None}
    scores = [NetRecord.from_json({**facts, "test_bpc": bits, "test_loss": bits}) for bits in (2.5, 2.7)]
    given = Header.read({**gpt([0, 0]), "experiment": "kd"})
    given.config |= {"student": {"class_path": "x.GPT"}, "net": None, "model": None}
    kd = combine(given, [FitRecord(1, None, {"teacher": scores[0]})] * 2, {"ce": scores}, [1.0] * 2, BITS)
    folders = runs("a", gpt([3.0, 3.1])), runs("b", kd)
    found, notes = rows(*folders)
    assert found["b/ce"]["differences"] == pytest.approx([-0.5, -0.4])
    assert notes == [f"b and a differ in settings: student. {CONFOUNDED}"]
    assert rows(*folders[::-1])[0]["a/gpt"]["differences"] == pytest.approx([0.5, 0.4])
    assert (
        differing(*folders)
        == """\
What differs and may move results:

setting  a                  b
-------  -----------------  ---
net      GPT(num_layers=4)  —
model    (lr=0.003)         —
student  —                  GPT"""
    )


MEASURES = {
    "kd": (results(), "a run of kd.py measured by accuracy", "accuracy"),
    "gpt": (gpt([3.0]), "a run of gpt.py, or of kd.py on texts", "bits per character"),
}


@pytest.mark.parametrize(("first", "second"), [*itertools.permutations(MEASURES, 2)])
def test_runs_of_different_measures_are_refused_in_one_line(runs, refusal, first, second):
    one, other = (runs(name, MEASURES[name][0]) for name in (first, second))
    said = f"to compare with {first}; this one is of {second}.py, measured by {MEASURES[second][2]}"
    assert refusal(main, one, other) == f"{other}: expected {MEASURES[first][1]}, {said}"


@pytest.mark.parametrize(("found", "changes"), [
    *((results(), changes) for changes in (
        {"seeds": None}, {"seeds": [1]}, {"students": {"kd": {}}}, {"students": [1]}, {"data": None}, {"metric": []},
        *({"students": {"kd": {**results().students["kd"].to_json(), **change}}} for change in (
            {"test_acc": ["a", 1, 2]}, {"parameters": "many"},
        )),
    )),
    *((gpt([3.0]), changes) for changes in (
        {"students": {"gpt": {"test_bpc": 3.0}}}, {"seeds": [0, 1]}, {"metric": None}, {"config": [1]},
        {"hardware": [1]}, {"data": {"train": 9}},
    )),
])  # fmt: skip
def test_damaged_runs_are_refused_in_one_line(runs, refusal, found, changes):
    other = runs("other", found, **changes)
    for before in ([], [runs("good", found)]):
        line = refusal(main, *before, other)
        assert line.startswith(f"{other}: expected a readable results.json of our experiments in it (")


def test_a_run_without_ce_is_read_as_carefully(runs, refusal):
    kd = {**results().students["kd"].to_json(), "test_acc": [0.5]}
    line = refusal(main, runs("t4"), runs("other", students={"kd": kd}))
    assert "a readable results.json of our experiments in it (ValueError" in line


def test_first_run_without_ce_gives_no_differences(runs, capsys):
    main([runs("t4", results(kd=[student(c) for c in KD])), runs("t8"), "--out", "x"])
    page = capsys.readouterr().out
    assert "no student called ce" in page
    assert "[" not in page
    assert json.loads(Path("x/compare.json").read_text())["baseline"] is None


def test_names_are_as_short_as_tells_runs_apart(runs):
    found = load_runs([runs("a/t4"), runs("b/t4"), runs("b/t8")])
    assert [run.name for run in found] == ["a/t4", "b/t4", "t8"]


def test_default_folder(runs, capsys):
    main([runs("a/t4"), runs("b/t4")])
    assert "in runs/compare/a_t4-b_t4\n" in capsys.readouterr().out
    assert Path("runs/compare/a_t4-b_t4/compare.md").is_file()


def test_a_run_is_never_overwritten(runs, refusal):
    one, other = Path(runs("one")), runs("other")
    (one / "report.html").write_text("mine")
    line = refusal(main, one, other, "--out", one)
    assert line == f"--out {one}: expected a folder without a run or another table; this one holds results.json"
    assert {path.name for path in one.iterdir()} == {"report.html", "results.json"}
    assert (one / "report.html").read_text() == "mine"
    for _ in range(2):  # its own table may be written again
        main([str(one), other, "--out", "table"])


def test_many_runs_get_a_short_folder(runs, capsys):
    main([runs(f"a-long-name-for-a-run-{i}") for i in range(6)])
    name = capsys.readouterr().out.strip().rsplit("/", 1)[-1]
    assert len(name) < 85
    assert max(map(len, Path("runs/compare", name, "compare.md").read_text().splitlines())) > 110  # no wrapping there


def test_one_seed(runs):
    one = combine(header(1), [teacher()], {"ce": [student(1)], "kd": [student(2)]}, [1.0])
    found, notes = rows(runs("t4", one))
    assert found["t4/kd"]["delta"]["low"] is None
    assert any("One seed gives no interval" in note for note in notes)


def test_data_sets_say_which_options_change_nothing():
    for name in ("Digits", "MNIST", "CIFAR10", "Shakespeare"):
        assert "root" in getattr(datamodules, name).free_options
    for kind in (datamodules.InMemoryData, datamodules.ImageFolder, datamodules.LabelledText):
        assert "root" not in kind.free_options


def test_bad_input_is_one_line(runs, refusal, tmp_path, capsys):
    t4, half = runs("t4"), Path(runs("half"))
    other = runs("speed", {"format": FORMAT, "experiment": "pipeline", "rows": []})
    losses = runs("losses", metric={"name": "loss", "higher_is_better": False})
    (half / "results.json").rename(half / "config.yaml")
    (tmp_path / "file").touch()
    assert "required: RUN" in refusal(main)
    assert "unrecognized arguments: --ou" in refusal(main, t4, "--ou", "x")
    assert f"{tmp_path}/no: expected" in refusal(main, t4, tmp_path / "no")
    assert "given twice" in refusal(main, t4, f"{tmp_path}/half/../t4")
    said = f"{other}: expected a run of kd.py or gpt.py; this one is of pipeline.py"
    assert refusal(main, other) == refusal(main, t4, other) == said
    assert "this one has loss" in refusal(main, t4, losses)
    assert f"--out {half} --resume true" in refusal(main, half)
    assert "--out file/x: expected a folder that can be written" in refusal(main, t4, "--out", "file/x")
    for argv in ([], [t4, f"{tmp_path}/no"], [other], [t4, other], [t4, losses], [str(half)]):  # without --out
        with pytest.raises(SystemExit) as stop:
            main(argv)
        shown, error = capsys.readouterr()
        assert (stop.value.code, shown, error.count("\n")) == (2, "", 1)
        assert ("required: RUN" in error) == (not argv)
    assert not Path("runs").exists()
