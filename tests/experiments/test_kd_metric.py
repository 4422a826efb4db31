"""--metric: a run of kd.py that is judged by something else than the accuracy, and what its results.json says."""

from pathlib import Path

import pytest
import torch
from sklearn.metrics import balanced_accuracy_score

from datamodules import Digits
from experiments import compare, kd
from harness.runs.files import write_json
from harness.runs.nets import load_net
from tests import bake_off_facts
from tests.commands import Refusal, results, run_of

QUICK = [
    "--data", "Digits",
    "--teacher", "LightNN", "--trainer.max_epochs", "1", "--data.train_size", "150", "--only", "ce", "kd",
]  # fmt: skip


finished = run_of(kd, *QUICK, "--seeds", "2", "--metric", "balanced_accuracy")


def test_the_table_is_of_the_metric_and_the_accuracy_stays(finished: Path) -> None:
    found = results(finished)
    assert found["metric"] == {"name": "test_balanced_accuracy", "higher_is_better": True}
    kd_entry, ce_entry = found["students"]["kd"], found["students"]["ce"]
    for entry in (found["teacher"], kd_entry, ce_entry):
        assert [c / 360 for c in entry["test_correct"]] == pytest.approx(entry["test_acc"])
        for epochs in entry["epochs"]:
            assert {"val/balanced_accuracy", "val/acc"} <= set(epochs[0])
    values = zip(kd_entry["test_balanced_accuracy"], ce_entry["test_balanced_accuracy"], strict=True)
    assert kd_entry["delta_vs_ce"]["mean"] == pytest.approx(sum(one - other for one, other in values) / 2)
    page = (finished / "results.md").read_text()
    assert "| test balanced accuracy, % |" in page
    assert "\nBalanced accuracy: mean ± standard deviation over 2 seeds.\n" in page
    data = Digits()
    data.setup()
    test = data.split("test")
    with torch.no_grad():
        guesses = load_net(finished / "seed1" / "kd")(data.normalize(test.inputs)).argmax(1)
    assert kd_entry["test_balanced_accuracy"][1] == pytest.approx(balanced_accuracy_score(test.labels, guesses))


def test_runs_of_two_metrics_are_not_compared(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], refusal: Refusal
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    write_json(other / "results.json", bake_off_facts.results().to_json())
    compare.main([str(finished), "--out", str(tmp_path / "alone")])
    assert "balanced accuracy, %" in capsys.readouterr().out
    assert refusal(compare.main, finished, other) == (
        f"{other}: expected a run of kd.py measured by balanced accuracy, to compare with {finished.name}; "
        "this one is of kd.py, measured by accuracy"
    )
