"""experiments/compare.py: finished runs in one table."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

import datamodules
from harness.reports.metrics import paired_interval
from harness.reports.pages import save_results
from harness.reports.results import bake_off_results
from harness.runs.files import write_json
from harness.studies.compare import compare, load_runs
from tests.bake_off_facts import CE, FAILED, KD, TEST, header, results, student, teacher

SCRIPT = Path(__file__).parents[2] / "experiments" / "compare.py"


@pytest.fixture(scope="module")
def main():
    spec = importlib.util.spec_from_file_location("compare_script", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """A function that leaves a run in a folder, given how its results differ from the usual ones."""
    monkeypatch.chdir(tmp_path)

    def leave(name, found=None, **changes):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        write_json(folder / "results.json", {**(found or results()), **changes})
        return str(folder)

    return leave


def rows(*folders):
    found = compare(load_runs(folders))
    return {row["name"]: row for row in found["rows"]}, found["notes"]


def refused(main, capsys, *argv):
    with pytest.raises(SystemExit) as caught:
        main(argv)
    out, err = capsys.readouterr()
    assert caught.value.code == 2
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    return err


def test_end_to_end(tmp_path):
    for name in ("t4", "t8"):
        (tmp_path / name).mkdir()
        save_results(tmp_path / name, results())
    command = [sys.executable, "-W", "error", str(SCRIPT), "t4", "--out", "both", "t8"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, encoding="utf-8", check=False)
    assert (done.returncode, done.stderr) == (0, "")
    table = done.stdout[: done.stdout.index("\n\n")].splitlines()
    lines = [line.split("  ")[0] for line in table if line.startswith(("t4/", "t8/"))]
    assert lines == ["t4/ce", "t4/kd", "t4/hint", "t8/ce", "t8/kd", "t8/hint"]
    assert "Saved compare.md, compare.png and compare.json in both" in done.stdout
    assert sorted(path.name for path in (tmp_path / "both").iterdir()) == ["compare.json", "compare.md", "compare.png"]
    assert max(map(len, done.stdout.splitlines())) <= 110
    saved = json.loads((tmp_path / "both" / "compare.json").read_text())
    assert saved["baseline"] == "t4/ce"
    assert [run["name"] for run in saved["runs"]] == ["t4", "t8"]


def test_differences_are_to_the_first_runs_ce(runs):
    other = results(kd=[student(c) for c in KD])
    found, notes = rows(runs("t4"), runs("t8", other))
    assert found["t8/kd"]["delta"] == paired_interval([(k - c) / TEST for k, c in zip(KD, CE, strict=True)])
    assert found["t4/ce"]["delta"] == {"mean": 0, "low": 0, "high": 0}
    assert any("t8/kd (+2.00)" in note for note in notes)


def test_differences_are_paired_over_common_seeds_and_by_seed(runs):
    shuffled = {**results(kd=[student(KD[2]), student(380), student(KD[0])]), "seeds": [2, 7, 0]}
    found, notes = rows(runs("t4"), runs("t8", shuffled))
    assert found["t8/kd"]["delta"] == paired_interval([(KD[0] - CE[0]) / TEST, (KD[2] - CE[2]) / TEST])
    assert any("in common with the first" in note for note in notes)


def test_failed_seeds_are_left_out_and_named(runs):
    other = results(kd=[student(1, FAILED), *(student(c) for c in KD[1:])])
    found, notes = rows(runs("t4"), runs("t8", other))
    assert found["t8/kd"]["delta"] == paired_interval([(KD[i] - CE[i]) / TEST for i in (1, 2)])
    assert any(note.startswith("* t8/kd: the loss stopped being finite with seed 0") for note in notes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"data": {**header()["data"], "train": 900}}, "other data (train 900, not 1257)"),
        ({"data": {**header()["data"], "name": "MNIST"}}, "other data (name MNIST, not Digits)"),
        ({"config": header(seed=1)["config"]}, "other data (data.seed 1, not 0)"),
        ({"seeds": [7, 8, 9]}, "no seed in common (7, 8 and 9)"),
    ],
)
def test_what_is_not_comparable_says_why(runs, changes, said):
    found, notes = rows(runs("t4"), runs("t8", **changes))
    assert found["t8/kd"]["delta"] == {"mean": None, "low": None, "high": None}
    assert found["t4/kd"]["delta"]["mean"] is not None
    assert any(note.startswith("t8 is not compared with t4/ce: ") and said in note for note in notes)


def test_settings_that_choose_no_samples_are_comparable(runs):
    other = header(batch_size=64, augment=True, root="elsewhere")["config"]
    found, _ = rows(runs("t4"), runs("t8", config=other), runs("bare", config=header()["config"]))
    assert found["t8/kd"]["delta"]["low"] is not None


def test_limits_choose_the_samples_that_they_leave(runs):
    def limited(count, **changes):
        return {"config": configured(**changes), "data": {**header()["data"], "test": count}}

    whole = header()["data"]["test"]
    found, notes = rows(
        runs("t4"),
        runs("all", **limited(whole, trainer__limit_test_batches=999, trainer__num_sanity_val_steps=0)),
        runs("part", **limited(128, trainer__limit_test_batches=1)),
        runs("seen", config=configured(trainer__limit_val_batches=1), data={**header()["data"], "validation": 7}),
        runs("drawn", **limited(whole, trainer__limit_test_batches=1, data__test_size=300)),
    )
    assert {name: found[f"{name}/kd"]["delta"]["low"] is not None for name in ("all", "part", "seen", "drawn")} == {
        "all": True, "part": False, "seen": True, "drawn": False,
    }  # fmt: skip
    assert any(note.startswith("drawn is not compared with t4/ce: other data (data.test_size 300,") for note in notes)
    assert not any("differ in settings" in note for note in notes)


def configured(**changes):
    """Another configuration: `a__b=1` is `a.b`."""
    config = header()["config"]
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
    "epochs": ({"trainer__max_epochs": 20}, "trainer.max_epochs 20, not 10"),
    "batch size": ({"data__batch_size": 64, "data__augment": True}, "data.batch_size 64, not 128; data.augment True"),
    "rate": ({"optimizer__lr": 0.01}, "optimizer.lr 0.01, not 0.001"),
    "optimizer": ({"optimizer": SGD}, "optimizer torch.optim.SGD, not torch.optim.Adam. What"),
    "limit": ({"trainer__limit_train_batches": 0.5}, "trainer.limit_train_batches 0.5, not None"),
    "precision": ({"trainer__precision": "bf16-mixed"}, "trainer.precision bf16-mixed, not None"),
    "teacher": ({"teacher_ckpt": "w.pt", "exact": 8}, "teacher_ckpt w.pt, not None; exact 8, not None"),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_runs_with_other_settings_have_intervals_and_no_verdict(runs, main, capsys, kind):
    changes, said = OTHERS[kind]
    found, notes = rows(runs("t4"), runs("t8", config=configured(**changes)), runs("t9"))
    assert found["t8/kd"]["delta"] == found["t9/kd"]["delta"]
    assert found["t8/kd"]["delta"]["low"] > 0
    told = [note for note in notes if note.startswith("t8 and t4 differ in settings: ")]
    assert len(told) == 1
    assert said in told[0]
    assert told[0].endswith("may come from these, not from a method: no verdict.")
    judged = next(note for note in notes if "beyond the noise" in note)
    assert "t4/kd" in judged
    assert "t9/kd" in judged
    assert "t8" not in judged
    main(["t4", "t8", "--out", "both"])
    assert "differ in settings" in capsys.readouterr().out
    assert "differ in settings" in Path("both/compare.md").read_text()
    assert set(json.loads(Path("both/compare.json").read_text())["runs"][1]["other_settings"]) == {
        piece.split()[0] for piece in told[0].split(": ")[1].split("; ")
    }


def test_methods_and_where_a_run_ran_are_no_settings(runs):
    ran = {"trainer__devices": 8, "trainer__strategy": {"class_path": "x.DDP", "init_args": {"timeout": 9}}}
    ran |= {"trainer__logger": False, "out": "x", "checkpoint_every": 5.0, "only": ["kd"], "teacher_cache_mb": 0}
    method = {"kd": {"class_path": "objectives.Hinton", "init_args": {"temperature": 8.0}}}
    config = configured(**ran, variants=method, scheduler=None, data__num_workers=3, seeds=[0, 1, 2])
    found, notes = rows(runs("t4"), runs("t8", config=config), runs("bare", config=None))
    assert found["t8/kd"]["delta"]["low"] > 0
    assert not any(note.startswith("t8 and t4") for note in notes)
    assert "t8/kd (+2.00)" in next(note for note in notes if "beyond the noise" in note)


def test_another_root_is_another_image_folder(runs):
    data = {**header()["data"], "name": "ImageFolder"}
    _, notes = rows(runs("a", data=data), runs("b", data=data, config=header(root="b")["config"]))
    assert any("data.root b, not a" in note for note in notes)


def test_first_run_without_ce_gives_no_differences(runs, main, capsys):
    main([runs("t4", results(kd=[student(c) for c in KD])), runs("t8"), "--out", "x"])
    page = capsys.readouterr().out
    assert "no student called ce" in page
    assert "[" not in page
    assert json.loads(Path("x/compare.json").read_text())["baseline"] is None


def test_names_are_as_short_as_tells_runs_apart(runs):
    found = load_runs([runs("a/t4"), runs("b/t4"), runs("b/t8")])
    assert [run.name for run in found] == ["a/t4", "b/t4", "t8"]


def test_default_folder(runs, main, capsys):
    main([runs("a/t4"), runs("b/t4")])
    assert "in runs/compare/a_t4-b_t4\n" in capsys.readouterr().out
    assert Path("runs/compare/a_t4-b_t4/compare.md").is_file()


def test_many_runs_get_a_short_folder(runs, main, capsys):
    main([runs(f"a-long-name-for-a-run-{i}") for i in range(6)])
    name = capsys.readouterr().out.strip().rsplit("/", 1)[-1]
    assert len(name) < 85
    assert max(map(len, Path("runs/compare", name, "compare.md").read_text().splitlines())) > 110  # no wrapping there


def test_one_seed(runs):
    one = bake_off_results(header(1), [teacher()], {"ce": [student(1)], "kd": [student(2)]}, [1.0])
    found, notes = rows(runs("t4", one))
    assert found["t4/kd"]["delta"]["low"] is None
    assert any("One seed gives no interval" in note for note in notes)


@pytest.mark.parametrize(
    "changes",
    [
        {"seeds": None},
        {"seeds": [1]},
        {"students": {"kd": {}}},
        {"students": {"kd": {**results()["students"]["kd"], "test_acc": ["a", 1, 2]}}},
        {"students": {"kd": {**results()["students"]["kd"], "parameters": "many"}}},
        {"students": [1]},
        {"data": None},
        {"metric": []},
    ],
)
def test_damaged_runs_are_refused_in_one_line(runs, main, capsys, changes):
    other = runs("other", **changes)
    said = refused(main, capsys, runs("t4"), other)
    assert said.startswith(f"error: {other}: expected a readable results.json of our experiments in it (")


def test_a_run_without_ce_is_read_as_carefully(runs, main, capsys):
    kd = {**results()["students"]["kd"], "test_acc": [0.5]}
    said = refused(main, capsys, runs("t4"), runs("other", students={"kd": kd}))
    assert "a readable results.json of our experiments in it (ValueError" in said


def test_data_sets_say_which_options_choose_samples():
    for name in ("Digits", "MNIST", "CIFAR10", "Shakespeare"):
        assert "root" in getattr(datamodules, name).free_options
    for kind in (datamodules.InMemoryData, datamodules.ImageFolder, datamodules.LabelledText):
        assert "root" not in kind.free_options
    assert datamodules.ImageFolder.training_options == {"batch_size", "augment"}


def test_bad_input_is_one_line(runs, main, capsys, tmp_path):
    t4 = runs("t4")
    other = runs("speed", {"experiment": "pipeline", "rows": []})
    losses = runs("losses", metric={"name": "loss", "higher_is_better": False})
    half = runs("half")
    Path(half, "results.json").rename(Path(half, "config.yaml"))
    (tmp_path / "file").touch()
    assert "required: RUN" in refused(main, capsys)
    assert "unrecognized arguments: --ou" in refused(main, capsys, t4, "--ou", "x")
    assert f"error: {tmp_path}/no: expected" in refused(main, capsys, t4, f"{tmp_path}/no")
    assert "given twice" in refused(main, capsys, t4, f"{tmp_path}/half/../t4")
    assert "this one is of the experiment pipeline" in refused(main, capsys, t4, other)
    assert "this one has loss" in refused(main, capsys, t4, losses)
    assert f"--out {half} --resume true" in refused(main, capsys, half)
    assert "error: --out file/x: expected a folder that can be written" in refused(main, capsys, t4, "--out", "file/x")
    assert not Path("runs").exists()
