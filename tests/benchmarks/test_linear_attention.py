"""The benchmarks of linear attention run; what they find is for a quiet machine."""

import json
from pathlib import Path

import pytest

from benchmarks import linear_attention_speed, recall
from tests.grids import mostly_slow


def test_chunks_are_timed_beside_other_forms(tmp_path: Path) -> None:
    linear_attention_speed.main(["--lengths", "70", "--repeat", "1", "--out", str(tmp_path / "out.json")])
    ratios = json.loads((tmp_path / "out.json").read_text())["ratios"]
    assert {*ratios} == {f"{kind} 70" for kind in ("linear", "delta")} | {
        f"{kind} 70, softmax" for kind in ("linear", "gated", "delta")
    }


@pytest.mark.parametrize("name", mostly_slow(recall.MIXERS, "softmax, convolution"))
def test_mixers_are_trained_to_recall(name: str, tmp_path: Path) -> None:
    recall.main(["--only", name, "--steps", "3", "--every", "2", "--out", str(tmp_path / "out.json")])
    answers = json.loads((tmp_path / "out.json").read_text())[name]
    assert [*answers] == ["2", "3"]
    assert all(0 <= share <= 1 for share in answers.values())
