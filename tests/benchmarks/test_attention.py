"""The benchmarks of attention run; what they find is for a quiet machine."""

import json
from pathlib import Path

import pytest

from benchmarks import attention_speed, recall
from tests.grids import mostly_slow
from tests.processes import Run


@pytest.mark.extras("transformers", "fla", "einops")
@pytest.mark.parametrize("part", mostly_slow(attention_speed.PARTS, "decoding"))
def test_layers_give_the_numbers_of_their_rivals(part: str, tmp_path: Path) -> None:
    run = Run(_time, part, tmp_path / "out.json", log=tmp_path / "log")
    assert run.wait() == 0, run.output
    ratios = json.loads((tmp_path / "out.json").read_text())["ratios"]
    names = {name for name in attention_speed.targets() if name.startswith(part)}
    assert names <= {*ratios} <= {*attention_speed.targets()}


def _time(part: str, out: Path) -> None:
    attention_speed.main(["--quick", "--repeat", "1", "--only", part, "--out", str(out)])


@pytest.mark.parametrize("name", mostly_slow(recall.MIXERS, "softmax, convolution"))
def test_mixers_are_trained_to_recall(name: str, tmp_path: Path) -> None:
    recall.main(["--only", name, "--steps", "3", "--every", "2", "--out", str(tmp_path / "out.json")])
    answers = json.loads((tmp_path / "out.json").read_text())["rows"][name]
    assert [*answers] == ["2", "3"]
    assert all(0 <= share <= 1 for share in answers.values())
