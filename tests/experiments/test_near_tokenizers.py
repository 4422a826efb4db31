"""kd.py with tokenizers that nearly fit: a token more than its model, others that differ in added tokens alone."""

import contextlib
import io
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments import kd
from harness.runs.nets import load_net
from tests import with_transformers
from tests.chats import rows, write_lines
from tests.commands import results
from tests.language_parts import SPECIAL, save_llama, save_tokenizer
from tests.training import assert_same

SIZE = 290
IMAGE, THINK = "<image>", ("<think>", "</think>")
OTHER = SPECIAL[0], "<|user|>", "<|end|>"
NAMES: dict[str, tuple[int, Any]] = {  # rows of the model, and what its tokenizer is made of
    "plain": (300, {}), "padded": (310, {}), "image": (SIZE, {"added": [IMAGE]}), "think": (310, {"added": THINK}),
    "other": (300, {"special": OTHER}), "swapped": (300, {"special": (SPECIAL[1], SPECIAL[0], SPECIAL[2])}),
}  # fmt: skip


def save(folder: Path, name: str) -> str:
    """A model with other weights for each name."""
    size, options = NAMES[name]
    model = save_llama(folder / name, vocab_size=size)
    g = torch.Generator().manual_seed(len(name))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=g)
    model.save_pretrained(folder / name)
    save_tokenizer(folder / name, **options)
    return str(folder / name)


def flags(folder: Path, teacher: str, student: str, *more: str) -> list[str]:
    path = write_lines(folder / "chat.jsonl", rows(24, 4))
    data = ["--data", "Chat", "--data.path", str(path), "--data.max_length", "60", "--data.batch_size", "4"]
    data += ["--data.validation_size", "4", "--data.test_size", "4", "--generated_prompts", "0"]
    nets = ["--student", "Pruned", "--student.layers", "2"]
    if student.startswith("Pruned of "):
        nets += ["--data.tokenizer", save(folder, student.removeprefix("Pruned of "))]
    elif student != "Pruned":
        nets = ["--student", "HuggingFaceLM", "--student.name", save(folder, student), "--student.pretrained", "true"]
    nets += ["--teacher", "HuggingFaceLM", "--teacher.name", save(folder, teacher), "--teacher.pretrained", "true"]
    fit = ["--seeds", "1", "--trainer.max_epochs", "1", "--trainer.limit_train_batches", "2", "--optimizer.lr", "0.01"]
    return [*data, *nets, *fit, *more]


METHODS = [
    "--variants.on.class_path", "GKD", "--variants.on.on_policy", "1", "--variants.on.max_new_tokens", "4",
    "--variants.sequencelevel.max_new_tokens", "4", "--only", "kd", "gkd", "on", "sequencelevel",
]  # fmt: skip
CASES = {  # teacher, student: what is said
    ("image", "Pruned"): "Chat: {}/image: its model has no rows for <image>; no text may have them",
    ("plain", "Pruned of think"): " texts; it lacks <think>, </think>, which no text has",
    ("image", "plain"): "",
    ("plain", "padded"): "teacher {}/plain: 10 of its 300 rows stand for no token; what is left out has ",
    ("think", "plain"): "teacher {0}/think: 290 of its 292 tokens are shared with {0}/plain, not <think>, </think>; "
    "18 of its 310 rows stand for no token; what is left out has ",
    ("plain", "think"): " texts; it lacks <think>, </think>, which no text has",
}
QUICK = ("image", "Pruned"), ("plain", "think")


def run(*arguments: str) -> str:
    """What kd.py prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        kd.main([*arguments])
    return printed.getvalue()


def refused(*arguments: str) -> str:
    """The line with which kd.py ends."""
    printed = io.StringIO()
    with contextlib.redirect_stderr(printed), pytest.raises(SystemExit):
        kd.main([*arguments])
    return printed.getvalue().splitlines()[-1]


@pytest.mark.extras("transformers")
@pytest.mark.parametrize(
    ("teacher", "student"),
    [pytest.param(*pair, id="-".join(pair), marks=[pytest.mark.slow] * (pair not in QUICK)) for pair in CASES],
)
@with_transformers.in_fork
def test_all_methods_train(teacher: str, student: str, folder: Path) -> None:
    """On what students and teachers write, too; packed, by a teacher that is stored, as by one that runs."""
    chosen = flags(folder, teacher, student)
    said = run(*chosen, *METHODS, "--out", str(folder / "live"))
    assert CASES[teacher, student].format(folder) in said
    live = results(folder / "live")["students"]
    assert all(math.isfinite(row["test_loss"][0]) and row["test_agreement"][0] is not None for row in live.values())
    assert len({row["test_loss"][0] for row in live.values()}) == len(live)
    packed = [*chosen, "--only", "kd", "gkd", "--data.pack", "true", "--teacher_cache_dir", str(folder / "kept")]
    stored = {"packed": [], "all": ["all"], "250": ["250"], "again": ["250"]}
    for name, top_k in stored.items():
        run(*packed, *(["--teacher_top_k", *top_k] if top_k else []), "--out", str(folder / name))
    for method in ("kd", "gkd"):
        losses = [results(folder / name)["students"][method]["test_loss"][0] for name in stored]
        assert losses[1] == pytest.approx(losses[0], rel=1e-6)
        assert losses[2] == losses[3] == pytest.approx(losses[0], rel=1e-2)


@pytest.mark.extras("transformers")
@with_transformers.in_fork
def test_tokens_that_a_model_lacks_are_refused_where_they_occur(folder: Path) -> None:
    """Another token for a turn: the teacher lacks it; but the student learns the teacher's, at its own rows."""
    chosen, teacher = flags(folder, "other", "plain"), str(folder / "other")
    expected = f"error: --data.tokenizer {folder}/plain: expected texts without <|im_start|>, which {teacher} lacks: "
    ways_out = f"another --data.template, or --data.tokenizer {teacher}, whose tokens students then learn"
    assert refused(*chosen) == expected + ways_out
    taken = [*chosen, "--data.tokenizer", teacher, "--only", "kd", "--out", str(folder / "run")]
    said = run(*taken)
    learns = "Chat: student learns <|user|>, <|end|> at its rows for their numbers, and is left without"
    assert f"{learns} <|im_start|>, <|im_end|>, as {teacher} has its tokens" in said
    from transformers import AutoTokenizer

    exported = AutoTokenizer.from_pretrained(folder / "run" / "seed0" / "kd" / "hf")
    assert exported.get_vocab() == AutoTokenizer.from_pretrained(teacher).get_vocab()
    expected = (
        f"error: --data.tokenizer {folder}/swapped: expected {folder}/plain beside --student Pruned, a part of it"
    )
    assert refused(*flags(folder, "plain", "Pruned of swapped")) == expected
    chosen = flags(folder, "image", "Pruned")
    write_lines(folder / "chat.jsonl", [*rows(24, 4), {"prompt": "a", "response": f"an {IMAGE}"}])
    line = f"expected texts without this token, for which the model {folder}/image has no row"
    assert refused(*chosen) == f"error: --data.path {IMAGE}: {line}"


@pytest.mark.slow
@pytest.mark.extras("transformers")
@with_transformers.in_fork
def test_processes_change_nothing(folder: Path) -> None:
    chosen = [*flags(folder, "plain", "think"), "--only", "kd", "gkd", "--exact", "2"]
    for name, devices in (("one", "1"), ("two", "2")):
        run(*chosen, "--trainer.devices", devices, "--out", str(folder / name))
    one, two = (load_net(folder / name / "seed0" / "gkd").state_dict() for name in ("one", "two"))
    assert_same(one, two)
