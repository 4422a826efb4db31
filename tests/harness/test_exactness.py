"""Runs that we choose are exact unless told otherwise, and say what they are."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from experiments import gpt, kd
from harness.runs.exactness import settle_exact
from harness.runs.session import Session, session
from lit_modules.nets import LightNN
from tests.commands import Refusal, nets, results

SMALL = (
    *("--data.train_size", "40", "--data.test_size", "20", "--data.batch_size", "20", "--teacher", "LightNN"),
    *("--seeds", "1", "--trainer.max_epochs", "1", "--only", "ce", "kd"),
)
SAID = "exact: the same bits on 1 to 8 devices, for about twice the computing; --exact null turns it off\n"
OFF = "up to rounding: numbers may differ with the devices, as exact is off; "
COUNTING = f"{__name__}.Counting"
STATE = "training_step: expected training steps that change no buffer but BatchNorm's; students.ce.net.seen has changed"


class Counting(LightNN):
    """A user's net that counts its forwards, of which there are as many as shards."""

    seen: Tensor

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
        return super().forward(x)


def settled(*flags: str) -> Session:
    """The session of a run before it is trained."""
    with session("kd", kd.parser(), flags) as run:
        settle_exact(run, lambda: kd.KD(run).prepare())
    return run


@pytest.mark.parametrize(
    ("main", "flags", "exact"),
    [
        (kd, (), 8),
        (kd, ("--data", "Chat"), 8),
        (kd, ("--recipe", "few-labels"), 8),
        (kd, ("--exact", "null"), None),
        (kd, ("--exact", "3"), 3),
        (kd, ("--data", "Digits"), None),
        (kd, ("--data", "Chat", "--data.path", "chat.jsonl", "--teacher", "GPT", "--student", "GPT"), None),
        (kd, ("--recipe", "tutorial"), None),
        (gpt, (), 8),
        (gpt, ("--trainer.max_steps", "8", "--variants.one", "GPT"), 8),
        (gpt, ("--exact", "null"), None),
        (gpt, ("--data.path", "text"), None),
        (gpt, ("--data", "Chat"), None),
    ],
)
def test_our_experiments_are_exact_by_default(main: Any, flags: tuple[str, ...], exact: int | None) -> None:
    assert main.parser().parse(flags).exact == exact


REASONS = {  # why our runs are not exact with some flags: how the line begins with which these are refused
    "devices": (("--trainer.devices", "9"), "--exact 8: expected at least 9, the number of devices"),
    "strategy": (("--trainer.strategy", "ddp_allreduce"), "--exact 8: expected a strategy that can hold it: ddp, "),
    "precision": (("--trainer.precision", "16-mixed"), "--exact 8: expected --trainer.precision other than 16-mixed"),
    "net": (("--student", COUNTING), STATE),
}


@pytest.mark.filterwarnings("ignore:You passed `Trainer.accelerator='cpu', precision='16-mixed'")
@pytest.mark.parametrize("why", REASONS)
def test_where_it_can_not_be_kept_the_run_goes_on_and_says_why(
    why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], refusal: Refusal
) -> None:
    flags, reason = REASONS[why]
    run = settled(*SMALL, *flags)
    *_, line = capsys.readouterr().out.splitlines()
    assert line.startswith(OFF + reason)
    assert (run.config.exact, run.parsed.exact) == (None, None)
    assert line == OFF + refusal(kd.main, *SMALL, *flags, "--exact", "8")


@pytest.mark.parametrize(
    ("threads", "flags", "devices"),
    [
        ("1", (), "auto"),
        ("2", (), 2),
        ("64", (), 8),
        ("2", ("--trainer.devices", "1"), 1),
        ("2", ("--exact", "8"), "auto"),
    ],
)
def test_each_core_has_a_process_unless_the_user_says_how_many(
    threads: str, flags: tuple[str, ...], devices: int | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    assert settled(*SMALL, *flags).config.trainer.init_args["devices"] == devices


def test_without_exact_there_is_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert settled(*SMALL, "--student", COUNTING).config.trainer.init_args["devices"] == "auto"


def test_what_else_is_wrong_is_refused(refusal: Refusal) -> None:
    line = refusal(kd.main, *SMALL, "--trainer.devices", "9", "--variants.kd.temperature", "0")
    assert line.startswith("--variants.kd.temperature 0")


def test_a_run_says_what_it_is_and_grows_as_it_was_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], refusal: Refusal
) -> None:
    exact, plain = tmp_path / "exact", tmp_path / "plain"
    for out, *flags in ((exact,), (plain, "--exact", "null")):
        kd.main([*SMALL, *flags, "--out", str(out)])
        assert (SAID in capsys.readouterr().out) is (out == exact)
        kd.main(["--out", str(out), "--resume", "true", "--only", "ce", "kd", "ttm"])
        assert "exact:" not in capsys.readouterr().out
        used = 8 if out == exact else None
        assert (yaml.safe_load((out / "config.yaml").read_text())["exact"], results(out)["config"]["exact"]) == (
            used,
        ) * 2
    line = refusal(kd.main, "--out", exact, "--resume", "true", "--trainer.devices", "9")
    assert line == "--exact 8: expected at least 9, the number of devices"
    kd.main([*SMALL[:-2], "ce", "kd", "ttm", "--exact", "8", "--out", str(tmp_path / "whole")])
    whole, grown = nets(tmp_path / "whole"), nets(exact)
    assert whole.keys() == grown.keys()
    assert all(torch.equal(tensor, grown[name]) for name, tensor in whole.items())


def test_a_method_with_a_memory_of_all_samples_can_be_exact(tmp_path: Path) -> None:
    """Its buffers change once a global batch, not in a shard."""
    flags = ["--data", "Digits", "--data.train_size", "150", "--teacher", "LightNN", "--only", "crd", "--seeds", "1"]
    kd.main([*flags, "--trainer.max_epochs", "1", "--exact", "4", "--out", str(tmp_path / "run")])
    assert (tmp_path / "run" / "results.json").is_file()
