"""Scores of responses: bits per byte of what is scored, prompts as units of intervals, agreement on response tokens."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from apprentice.batch import IGNORED
from datamodules import Chat
from harness.reports import samples
from harness.reports.uncertainty import crossed_interval
from harness.runs.nets import load_net
from lit_modules.tasks import BYTES, Tokens
from tests import bake_off_facts
from tests.chats import write_lines
from tests.commands import results, start
from tests.training import near_ties

SMALL = [
    "--data", "Chat", "--data.batch_size", "4", "--data.test_size", "10", "--data.validation_size", "4",
    *(f"--{net}.{name}={size}" for net in ("teacher", "student") for name, size in
      {"num_layers": 1, "num_heads": 1, "embed_dim": 8}.items()),
    "--teacher", "GPT", "--student", "GPT", "--only", "ce", "kd", "--trainer.max_epochs", "1",
]  # fmt: skip


def several_answers(folder: Path) -> Path:
    """Prompts that have one, two or three answers of unequal lengths, one of them beyond ASCII."""
    lines = [
        {"prompt": f"{number} plus {number}?", "response": f"{'grün ' * answer}{'x' * (number * 5 % 13)}{2 * number}"}
        for number in range(24)
        for answer in range(1 + number % 3)
    ]
    return write_lines(folder / "answers.jsonl", lines)


@pytest.mark.parametrize("tokenizer", ["bytes", "characters"])
def test_a_responses_bytes_are_those_that_are_scored(tokenizer: str, tmp_path: Path) -> None:
    lines = [{"prompt": f"{i}", "response": "ä€" * 4 + str(i)} for i in range(10)]
    path = write_lines(tmp_path / "a.jsonl", lines)
    for longest, expected in ((64, "ä€" * 4 + "5"), (8, None)):
        data = Chat(path, tokenizer=tokenizer, max_length=longest, validation_size=0, test_size=3)
        data.setup()
        for part in ("train", "test"):
            split = data.split(part)
            _, labels = split.take(torch.arange(len(split.labels)))
            texts = [data.vocabulary.decode(row[row >= 0]).rstrip("\x03") for row in labels]
            if tokenizer == "bytes" and expected is None:  # a character may be cut in two
                assert split.response_bytes().tolist() == (labels >= 0).sum(1).tolist()
            else:
                assert split.response_bytes().tolist() == [len(text.encode()) for text in texts]
            if expected:
                assert {len(text) for text in texts} == {len(expected)}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("responses")
    start(folder / "run", *SMALL, "--data.path", str(several_answers(folder)), "--seeds", "2").check()
    return folder


def test_a_run_has_the_scores_of_its_responses(run: Path) -> None:
    """Loss a token, bits per byte and agreement, computed again from the nets' weights, one response at a time."""
    found, facts = results(run / "run"), {"batch_size": 4, "test_size": 10, "validation_size": 4}
    data = Chat(run / "answers.jsonl", **facts)
    data.setup()
    test, folder = data.split("test"), run / "run" / "seed0"
    teacher, student = (load_net(folder / name, "out").eval() for name in ("teacher", "kd"))
    nats, agreed, written, prompts, unsure = [], [], [], [], 0
    for place in range(len(test.labels)):
        inputs, labels = test.take(torch.tensor([place]))
        counts = labels[0] != IGNORED
        with torch.no_grad():
            ours, theirs = (net(inputs)[0][counts] for net in (student, teacher))
        nats.append(F.cross_entropy(ours.double(), labels[0][counts], reduction="sum").item())
        agreed += (ours.argmax(1) == theirs.argmax(1)).tolist()
        unsure += near_ties(ours) + near_ties(theirs)
        written.append(len(data.vocabulary.decode(labels[0][counts][:-1]).encode()))
        prompts.append(data.vocabulary.decode(test.prompt(place)))
    entry, tokens = found["students"]["kd"], len(agreed)
    assert entry["test_loss"][0] == pytest.approx(sum(nats) / tokens, abs=1e-6)
    assert entry["test_bpb"][0] == pytest.approx(sum(nats) / math.log(2) / sum(written), abs=1e-6)
    assert entry["test_agreement"][0] == pytest.approx(np.mean(agreed), abs=1e-9 + unsure / tokens)
    units = list(dict.fromkeys(prompts))
    assert len(units) < len(prompts)
    by_unit = [
        [sum(x for x, p in zip(of, prompts, strict=True) if p == unit) for unit in units] for of in (nats, written)
    ]
    expected = np.array(by_unit[0]) / math.log(2) / np.mean(by_unit[1])
    assert entry["test_sample_bpb"][0] == pytest.approx(expected, abs=1e-5)
    assert samples.unpack_classes(found["teacher"]["test_weights"]).tolist() == by_unit[1]
    assert np.mean(entry["test_sample_bpb"][0]) == pytest.approx(entry["test_bpb"][0], abs=1e-5)


def test_under_a_limit_bytes_are_those_of_what_is_tested(run: Path, tmp_path: Path) -> None:
    """One batch of four of ten responses, drawn by the data module."""
    flags = [*SMALL, "--data.path", str(run / "answers.jsonl"), "--seeds", "1", "--trainer.limit_test_batches", "1"]
    start(tmp_path / "part", *flags).check()
    entry = results(tmp_path / "part")["students"]["ce"]
    assert np.mean(entry["test_sample_bpb"][0]) == pytest.approx(entry["test_bpb"][0], abs=1e-5)
    data = Chat(run / "answers.jsonl", batch_size=4, test_size=10, validation_size=4)
    data.setup()
    places = data._evaluated_places("test", 4)
    test = data.split("test")
    rate = int(test.labels[places].sum()) / int(test.response_bytes()[places].sum())
    assert rate != data.tokens_per_byte["test"]
    assert entry["test_bpb"][0] == pytest.approx(entry["test_loss"][0] / math.log(2) * rate, abs=1e-9)


def test_bits_are_over_the_bytes_of_the_part_that_is_scored(run: Path) -> None:
    data = Chat(run / "answers.jsonl", batch_size=4, test_size=10, validation_size=4)
    rates = {}
    for part in ("train", "validation"):
        texts = data.split(part)
        rates[part] = int(texts.labels.sum()) / int(texts.response_bytes().sum())
    assert len({*rates.values(), data.tokens_per_byte["test"]}) == 3
    for epoch in json.loads((run / "run" / "seed0" / "students.json").read_text())["nets"]["ce"]["epochs"]:
        for part, stage in (("train", "train"), ("validation", "val")):
            bits = epoch[f"{stage}/loss"] / math.log(2) * rates[part]
            assert epoch[f"{stage}/bpb"] == pytest.approx(bits, rel=1e-6)


def test_the_pages_speak_of_prompts_and_bytes(run: Path) -> None:
    page = (run / "run" / "results.md").read_text()
    assert "bits per byte" in page
    assert "agreement with the teacher, %" in page
    assert "over seeds and test prompts, bits" in page
    assert "conversations" in page


@pytest.mark.slow
def test_several_processes_keep_the_same_values(run: Path, tmp_path: Path) -> None:
    flags = [*SMALL, "--data.path", str(run / "answers.jsonl"), "--seeds", "1", "--trainer.precision", "64-true"]
    runs = []
    for devices in ("1", "3"):
        start(tmp_path / devices, *flags, "--trainer.devices", devices).check()
        runs.append(results(tmp_path / devices)["students"])
    for name in ("ce", "kd"):
        one, three = (of[name] for of in runs)
        for key in ("test_bpb", "test_agreement", "test_kl", "test_sample_bpb"):
            assert np.array(one[key]) == pytest.approx(np.array(three[key]), abs=1e-9)


def test_an_interval_over_prompts_is_that_of_a_ratio() -> None:
    """The residuals of Σ bits / Σ bytes, by a formula written out."""
    generator = np.random.default_rng(0)
    sizes = generator.integers(1, 90, 12)
    bits = generator.random((2, 3, 12)) * sizes  # of two students, three seeds
    found: Any = bake_off_facts.results()
    found = replace(found, metric=BYTES)
    for name, of in zip(("kd", "ce"), bits, strict=True):
        found.students[name].samples = {"test_sample_bpb": [(x / sizes.mean()).tolist() for x in of]}
    found.teacher.sampled = {"test_weights": samples.pack_classes(sizes)}
    interval = samples.difference_over_both(found, "kd", "ce")
    ratios = (bits[0] - bits[1]).sum(1) / sizes.sum()
    residuals = (bits[0] - bits[1] - ratios[:, None] * sizes) / sizes.mean()
    expected = crossed_interval(residuals + ratios[:, None])
    assert interval == pytest.approx(expected, abs=1e-12)
    assert interval["mean"] == pytest.approx(ratios.mean(), abs=1e-12)


def test_a_record_has_one_value_a_prompt() -> None:
    task = Tokens(tokens_per_byte=0.5)
    values = {"place": torch.arange(3), "bpb": torch.tensor([3.0, 1.0, 2.0]), "tokens": torch.tensor([2.0, 4.0, 6.0])}
    units = {"unit": np.array([7, 5, 7]), "size": np.array([4, 8, 12])}
    kept = samples.summarize(task, values, lambda places: units)[1]
    assert kept["test_sample_bpb"] == pytest.approx([(3 * 4 + 2 * 12) / 12, 1 * 8 / 12])
    assert samples.unpack_classes(kept["test_weights"]).tolist() == [16, 8]
