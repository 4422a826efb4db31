"""A mixer of a user's own from the command line, in a folder that has its file alone."""

import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from experiments import export, gpt, kd
from harness.runs.nets import load_net
from lit_modules.nets import GPT
from tests import with_transformers
from tests.commands import Refusal, nets, results
from tests.experiments.test_documented import commands, shortened
from tests.experiments.test_mixer_students import check_processes_and_a_resume
from tests.language_parts import save_llama
from tests.own_mixers import EXAMPLE, WRONG, mixers_of
from tests.training import assert_same

TEXT = "the quick brown fox jumps over the lazy dog\n" * 60
DATA = ["--data.path", "a.txt", "--data.block_size", "12", "--data.batch_size", "6"]
STEPS = ["--trainer.max_steps", "4", "--trainer.val_check_interval", "2", "--model.warmup_steps", "2"]
KD = ["--data", "Text", *DATA, "--seeds", "1", "--trainer.max_epochs", "2", "--trainer.limit_train_batches", "4"]
LLAMA = ["--teacher", "HuggingFaceLM", "--teacher.name", "llama", "--teacher.pretrained", "true"]


def net(key: str, mixer: str = "mymixer.Mean", **options: str) -> list[str]:
    sizes = {"num_layers": "2", "num_heads": "2", "embed_dim": "8", "mixer": mixer}
    return [part for name, value in (sizes | options).items() for part in (f"--{key}.{name}", value)]


TEACHER = ["--teacher", "GPT", *net("teacher", "softmax", num_layers="3", position="rotary")]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for name, code in {"a.txt": TEXT, "mymixer.py": EXAMPLE, "wrong.py": WRONG}.items():
        (tmp_path / name).write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    for name in ("mymixer", "wrong"):
        sys.modules.pop(name, None)


def test_it_trains_writes_beyond_its_block_and_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    gpt.main([*DATA, *STEPS, *net("net", position="null"), "--out", "run"])
    facts = yaml.safe_load(Path("run/seed0/gpt/net.yaml").read_text())["init_args"]
    assert facts["mixer"] == {"class_path": "mymixer.Mean", "init_args": {}, "waits": True}
    capsys.readouterr()
    gpt.main(["--run", "run", "--sample", "the ", "--sample_tokens", "40"])
    assert len(capsys.readouterr().out) == 4 + 40 + 1
    loaded: Any = load_net(Path("run/seed0/gpt"))
    longer = GPT(**{**loaded.init_args, "block_size": 50, "mixer": sys.modules["mymixer"].Mean})
    longer.load_state_dict(loaded.state_dict())
    prompts = torch.tensor([[1, 2, 3]])
    assert torch.equal(loaded.generate(prompts, 40), longer.generate(prompts, 40))
    before = nets(Path("run"))
    gpt.main(["--out", "run", "--resume", "true"])
    assert_same(nets(Path("run")), before)


COMMANDS = [(name, flags) for name, flags in commands() if any(flag.startswith("mymixer.") for flag in flags)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "flags"), COMMANDS)
def test_the_pages_commands_run(name: str, flags: list[str]) -> None:
    assert len(COMMANDS) == 4
    import_module(f"experiments.{name}").main([*shortened(name, flags), "--out", "run"])


def test_processes_change_no_bit() -> None:
    flags = [*DATA, *STEPS, *net("net"), "--exact", "2"]
    gpt.main([*flags, "--out", "one"])
    gpt.main([*flags, "--trainer.devices", "2", "--out", "two"])
    assert_same(nets(Path("two")), nets(Path("one")))


def test_it_is_compared_with_attention() -> None:
    variants = ["--variants.mean", "GPT", *net("variants.mean"), "--variants.softmax", "GPT"]
    variants += [*net("variants.softmax", "softmax"), "--variants.made", "GPT", *net("variants.made", "wrong.make")]
    gpt.main([*DATA, *STEPS, *variants, "--decode_at", "16", "--out", "run"])
    rows = results(Path("run"))["students"]
    assert rows["mean"]["cache_bytes_16"] == 2 * 8 * 4 / 16
    assert rows["made"]["test_loss"] == rows["mean"]["test_loss"] != rows["softmax"]["test_loss"]
    assert all(row[f"decode_ms_16_{torch.get_num_threads()}"] > 0 for row in rows.values())
    assert mixers_of(load_net(Path("run/seed0/made")))[0].out.in_features == 8


def test_it_is_a_student_and_leaves(folder: Path) -> None:
    kd.main([*KD, *TEACHER, "--student", "GPT", *net("student"), "--only", "ce", "kd", "--out", "run"])
    assert {*results(folder / "run")["students"]} == {"ce", "kd"}
    export.main(["--run", "run/seed0/kd", "--out", "exported"])
    assert any((folder / "exported").iterdir())


@pytest.mark.slow
def test_it_replaces_a_teachers_attention(folder: Path) -> None:
    """On one process and two with the same bits, and resumed."""
    mixer = ["--student", "Mixer", "--student.mixer", "mymixer.Mean", "--student.softmax_layers", "1"]
    flags = [*KD, *TEACHER, *mixer, "--variants.align", "Linearize", "--only", "kd", "align"]
    check_processes_and_a_resume(folder, flags, "align", "student.mixer.yaml")
    (softmax,) = yaml.safe_load((folder / "one/seed0/student.mixer.yaml").read_text())["softmax_layers"]
    kinds = [type(mixer).__name__ for mixer in mixers_of(load_net(folder / "one/seed0/align"))]
    assert kinds == ["SelfAttention" if number == softmax else "Mean" for number in range(3)]


@pytest.mark.slow
@pytest.mark.extras("transformers")
def test_it_replaces_the_attention_of_a_llama(folder: Path) -> None:
    with_transformers.call(linearize_llama, folder, _flags())


def _flags() -> list[str]:
    return [*KD, "--data.tokenizer", "llama", *LLAMA, "--student", "Mixer", "--student.mixer", "mymixer.Mean",
            "--variants.align", "Linearize", "--only", "kd", "align", "--out", "run"]  # fmt: skip


def linearize_llama(folder: Path, flags: Sequence[str]) -> None:
    save_llama(folder / "llama")
    kd.main(flags)
    assert {*results(folder / "run")["students"]} == {"kd", "align"}


@pytest.mark.parametrize(
    ("mixer", "line"),
    [
        ("wrong.Silent", "--net.mixer Silent: expected a module whose forward takes tokens (B, T, 8) alone; it says: "),
        ("wrong.Half", "--net.mixer Half: expected outputs (2, 8, 8) of as many tokens; it gives (2, 8, 4)"),
        ("wrong.Ahead", "--net.mixer Ahead: expected one that sees earlier tokens alone: what it gives for a token"),
        ("wrong.Deaf", "--net GPT: expected a net that continues texts; it says: Plain.forward() got an unexpected"),
        ("wrong.Forgetful", "--net GPT: expected a model whose cached keys and values give the logits of one pass"),
        ("wrong.Number", "--net.mixer wrong.Number: expected softmax, "),
        ("wrong.bare", "the import path of a class; a function is annotated with what it returns"),
        ("wrong.Gone", "the import path of a class; AttributeError: module 'wrong' has no attribute 'Gone'"),
        ("absent.Mean", "the import path of a class; ModuleNotFoundError: No module named 'absent'"),
    ],
)  # fmt: skip
def test_wrong_mixers_end_in_a_line_before_training(mixer: str, line: str, refusal: Refusal) -> None:
    assert line in refusal(gpt.main, *DATA, *STEPS, *net("net", mixer), "--out", "run")


def test_what_a_mixer_lacks_is_said_where_it_is_asked_for(folder: Path, refusal: Refusal) -> None:
    plain = ["--variants.mine", "GPT", *net("variants.mine", "wrong.Plain"), "--decode_at", "16"]
    line = refusal(gpt.main, *DATA, *STEPS, *plain)
    assert line.startswith("--variants.mine GPT: expected a net whose mixers all have new_cache(), or without --decode")
    mixer = ["--student", "Mixer", "--student.mixer", "wrong.Ahead", "--only", "kd"]
    line = refusal(kd.main, *KD, *TEACHER, *mixer, "--out", "run")
    assert line.startswith("--student.mixer Ahead: expected one that sees earlier tokens alone")
    assert not (folder / "run").exists()  # and no teacher was trained


NET = """
from lit_modules.nets import GPT
from wrong import Plain


class Mine(GPT):
    def __init__(self, vocab_size: int, block_size: int, num_layers: int = 2, embed_dim: int = 32):
        super().__init__(vocab_size, block_size, num_layers, 4, embed_dim)
        for block in self.blocks:
            block.attention = {mixer}(embed_dim, 4)
"""


def test_a_gpt_whose_mixers_are_replaced_trains_unless_they_look_ahead(folder: Path, refusal: Refusal) -> None:
    (folder / "mynet.py").write_text(NET.format(mixer="Plain"))
    gpt.main([*DATA, *STEPS, "--net", "mynet.Mine", "--out", "run"])
    assert type(mixers_of(load_net(folder / "run/seed0/gpt"))[1]).__name__ == "Plain"
    (folder / "ahead.py").write_text(NET.format(mixer="Ahead").replace("Plain", "Ahead"))
    line = refusal(gpt.main, *DATA, *STEPS, "--net", "ahead.Mine", "--out", "other")
    assert line == "--net Mine: expected a language model: what it gives for a token depends on no later ones"
