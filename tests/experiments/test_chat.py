"""Trained models are asked in the template of their chats: by chat.py, by gpt.py --sample, and by the card of `hf/`."""

import io
import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from apprentice import keyed
from apprentice.errors import BadInput
from datamodules import Chat
from deploy.chat import printable
from experiments import chat, gpt, kd
from harness.runs.files import read_text, write_json
from harness.studies.text.language_model import load_trained
from harness.studies.text.vocabularies import FILE
from lit_modules.nets.generation import Sampling, row_keys
from tests import with_transformers
from tests.chats import chats, write_lines
from tests.commands import Refusal
from tests.language_parts import save_llama
from tests.terminal import on_terminal

SMALL = [f"--{net}.{option}={size}" for net in ("teacher", "student") for option, size in
         {"num_layers": 1, "num_heads": 2, "embed_dim": 16}.items()]  # fmt: skip
LONGEST = 96  # tokens
LINES = ["1 and 0?", "1 and 1?", "why?"]
Talk = Callable[..., str]


def train(folder: Path, *flags: str, out: str = "run") -> Path:
    path = write_lines(folder / "chats.jsonl", chats(30))
    common = ["--data", "Chat", "--data.path", str(path), "--data.max_length", str(LONGEST), "--data.test_size", "6"]
    kd.main([*common, "--only", "ce", "kd", "--trainer.max_epochs", "1", "--seeds", "1", "--trainer.logger", "false",
             "--generated_prompts", "2", "--generated_tokens", "4", *flags, "--out", str(folder / out)])  # fmt: skip
    return folder / out / "seed0"


@pytest.fixture(scope="module")
def nets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The nets of a seed; the teacher answers within a few tokens."""
    options = ["--optimizer.lr", "0.02", "--data.batch_size", "2", "--teacher_epochs", "6"]
    return train(tmp_path_factory.mktemp("chat"), "--teacher", "GPT", "--student", "GPT", *SMALL, *options)


@pytest.fixture
def talk(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Talk:
    """`talk(lines, *flags)` is what chat.py prints of these lines."""

    def call(lines: list[str], *flags: str) -> str:
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        capsys.readouterr()
        chat.main(flags)
        return capsys.readouterr().out

    return call


def sampled(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    capsys.readouterr()
    gpt.main([*flags])
    return capsys.readouterr().out


def test_a_conversation_is_the_same_each_time_and_that_of_sample(
    nets: Path, talk: Talk, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ["--run", str(nets / "teacher")]
    said = talk(LINES, *run, "--max_tokens", "8")
    assert said == talk(["/nothing", *LINES, "/quit", "no"], *run, "--max_tokens", "8").partition("\n")[2]
    both = talk(["other", "/reset", *LINES], *run, "--max_tokens", "8")
    assert both.partition("the conversation begins anew\n")[2] == said
    hot = ["--temperature", "3"]  # no answer ends as the teacher has learned
    first = talk(LINES[:1], *run, *hot, "--max_tokens", "999")
    assert first.partition("\n(cut")[0].strip() == printable(sampled(capsys, *run, *hot, "--sample", LINES[0])).strip()
    assert first != talk(LINES[:1], *run, *hot, "--max_tokens", "999", "--seed", "1")


def test_replies_are_what_the_template_and_the_keys_give(nets: Path, talk: Talk) -> None:
    model = load_trained(str(nets / "teacher"))
    data = Chat(nets.parents[1] / "chats.jsonl", max_length=LONGEST, test_size=6)
    data.setup()
    (end,) = data.end_tokens
    said, text = talk(LINES, "--run", str(nets / "teacher"), "--max_tokens", "8", "--temperature", "2"), ""
    expected = []
    for turn, line in enumerate(LINES):
        text += f"\x02{line}\x03\x04"
        tokens = model.vocabulary.encode(text)
        uniform = row_keys(torch.zeros(1, dtype=torch.int64), 0, turn)
        (written,) = model.write(tokens, uniform, Sampling(2.0), 8)
        alone, drawn = tokens.tolist(), written.tokens.tolist()
        for place in range(len(drawn)):
            number = (keyed.bits(0, uniform, 8)[:, place].double() + 0.5) / 2**32
            with torch.no_grad():
                alone.append(int(Sampling(2.0).draw(model.net(torch.tensor([alone]))[:, -1], number)))
        assert alone[len(tokens) :] == drawn
        answer = re.sub("[\x01-\x05]", "", model.vocabulary.decode(torch.tensor([t for t in drawn if t != end])))
        expected.append(answer + ("" if drawn[-1] == end else "\n(cut: 8 tokens, as `max_tokens` says)"))
        text += f"{answer}\x03"
    assert said == printable("\n".join(expected)) + "\n"


def test_two_models_answer_as_each_alone(nets: Path, talk: Talk) -> None:
    flags = ["--max_tokens", "4", "--temperature", "0"]
    alone = [talk(LINES[:1], "--run", str(nets / name), *flags) for name in ("ce", "teacher")]
    both = talk(LINES[:1], "--run", str(nets / "ce"), str(nets / "teacher"), *flags)
    assert both == f"ce: {alone[0]}teacher: {alone[1]}"
    same = talk(LINES[:1], "--run", str(nets / "ce"), f"{nets}/../seed0/ce", *flags)
    assert same == f"{nets / 'ce'}: {alone[0]}{nets}/../seed0/ce: {alone[0]}"


def test_what_would_steer_a_terminal_is_replaced() -> None:
    text = "10\u00a0km, 你好\u3000世界, می\u200cخواهم, 👩\u200d💻"
    assert printable(text) == text
    assert printable("\x1b[2J\u202e\r") == "\ufffd[2J\ufffd\ufffd"


def test_a_context_that_is_full_is_said(nets: Path, talk: Talk) -> None:
    run = ["--run", str(nets / "teacher"), "--temperature", "3"]
    cut = talk(["x" * 80], *run)
    assert cut.endswith(f"\n(cut: the context of {LONGEST} tokens is full; /reset begins anew)\n")
    full = talk(["x" * 80, "y", "/reset", "1 and 0?"], *run, "--max_tokens", "14").splitlines()
    assert any(
        re.fullmatch(rf"\(the context of {LONGEST} tokens is full: .* has \d+; /reset begins anew\)", x) for x in full
    )
    assert full[full.index("the conversation begins anew") + 1].strip()
    assert "mark turns" in talk(["\x02"], *run)


def test_a_text_a_list_and_a_file_ask_the_same(
    nets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], refusal: Refusal
) -> None:
    run = ["--run", str(nets / "teacher"), "--temperature", "0"]
    two = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}, {"role": "user", "content": "c"}]
    text = sampled(capsys, *run, "--sample", "1 and 0?")
    assert text == sampled(capsys, *run, "--sample", json.dumps([{"role": "user", "content": "1 and 0?"}]))
    last = sampled(capsys, *run, "--sample", json.dumps(two))
    answered = [{"role": "assistant", "content": "never read"}]
    asked = [{"messages": [{"role": "user", "content": "1 and 0?"}]}, {"messages": two + answered}]
    file = write_lines(tmp_path / "asked.jsonl", asked)
    assert sampled(capsys, *run, "--sample", str(file)) == f"{text}\n{last}"
    raw = sampled(capsys, *run, "--sample", "1 and 0?", "--raw", "true")
    assert raw.startswith("1 and 0?")
    wrong = {
        '[{"role": "critic", "content": "a"}]': "--sample critic: expected roles of the built-in template",
        '[{"role"': '--sample [{"role": expected JSON, as it begins like',
        json.dumps(answered): "expected messages of which the last is not the assistant's",
        "x" * LONGEST: f"expected 1 to {LONGEST - 1} tokens, the net's block size less one; not {LONGEST + 3}",
    }
    for prompt, line in wrong.items():
        assert line in refusal(gpt.main, *run, "--sample", prompt)


def test_what_can_not_be_talked_to(
    nets: Path, tmp_path: Path, refusal: Refusal, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*flags: object) -> str:
        capsys.readouterr()
        with pytest.raises(SystemExit):
            chat.main([*map(str, flags)])
        (line,) = capsys.readouterr().err.splitlines()
        return line.removeprefix("error: ")

    assert refused().startswith("--run (nothing): expected folders of nets")
    assert refused("--run", nets / "ce", nets / "ce").endswith("expected each folder once")
    assert refused("--run", tmp_path).startswith(f"--run {tmp_path}: expected")
    assert f"or one of its nets' folders, as {nets.parent}/seed0/kd" in refused("--run", nets.parent)
    assert "not allowed, as nothing is trained" in refused("--run", nets / "ce", "--out", tmp_path)
    plain = Path(shutil.copytree(nets / "ce", tmp_path / "plain"))
    write_json(plain / FILE, {"characters": None})
    line = refused("--run", plain)
    assert "has the template of its chats; --resume true writes it into an older run; --raw true continues" in line
    for prompt in ('[{"role": "user", "content": "a"}]', write_lines(tmp_path / "asked.jsonl", chats(1))):
        assert "this model has learned no chats" in refusal(gpt.main, "--run", plain, "--sample", prompt)
    spec = plain / "net.yaml"
    spec.write_text(read_text(spec).replace("task: tokens", "task: classification"))
    assert "expected a language model; the task of this net is classification" in refused("--run", plain)
    write_json(plain / FILE, {"characters": None, "template": 5})
    spec.write_text(read_text(nets / "ce" / "net.yaml"))
    assert f"with a readable {FILE}" in refused("--run", plain)
    for flags in (["--temperature", "-1"], ["--max_tokens", "0"], ["--seed", "-1"], ["--seeds", "2"]):
        assert refused("--run", nets / "ce", *flags).startswith(f"{flags[0]} ")


def test_a_text_goes_on_raw(nets: Path, talk: Talk) -> None:
    model, flags = load_trained(str(nets / "ce")), ["--raw", "true", "--temperature", "0", "--max_tokens", "4"]
    said = talk(["ab"], "--run", str(nets / "ce"), *flags)
    (written,) = model.write(model.vocabulary.encode("ab"), torch.zeros(1).long(), Sampling(0.0), 4, raw=True)
    assert said.strip() == printable(re.sub("[\x01-\x05]", "", written.text)).strip()


def typed(nets: Path) -> None:
    sys.stdin = io.StringIO("1 and 0?\n")
    chat.main(["--run", str(nets / "ce"), str(nets / "kd"), "--max_tokens", "3", "--temperature", "0"])


def test_columns_on_a_terminal(nets: Path) -> None:
    seen = on_terminal(typed, nets)
    assert seen.code == 0
    assert seen.lines[0] == "ce, kd: /reset begins anew, /quit or Ctrl-D ends"
    assert re.fullmatch(r"┃ ce +┃ kd +┃", seen.lines[2])


@pytest.mark.extras("transformers")
@with_transformers.in_fork
def test_students_of_a_model_of_transformers(folder: Path) -> None:
    """A student and its folder `hf/` say the same, in the template of a file; the card's code asks so, too."""
    save_llama(folder / "lm", max_position_embeddings=128, num_hidden_layers=2)
    tokenizer_of = json.loads((folder / "lm" / "tokenizer_config.json").read_text())
    template = (folder / "lm" / "chat_template.jinja").read_text()
    assert "chat_template" not in tokenizer_of
    other = folder / "other.jinja"
    other.write_text(template.replace("<|im_start|>assistant\n", "<|im_start|>fox\n").replace(
        "{{ m['role'] }}", "{{ 'fox' if m['role'] == 'assistant' else m['role'] }}"))  # fmt: skip
    teacher = ["--teacher", "HuggingFaceLM", "--teacher.name", str(folder / "lm"), "--teacher.pretrained", "true"]
    student = ["--student", "Pruned", "--student.layers", "1", "--data.template", str(other)]
    made = train(folder, *teacher, *student)
    assert json.loads((made / "kd" / FILE).read_text()) == {
        "tokenizer": str(folder / "lm"),
        "template": other.read_text(),
    }
    outputs = []
    for name in ("kd", "kd/hf"):
        model = load_trained(str(made / name))
        messages = [{"role": "user", "content": "the fox"}]
        prompt = model.encode(messages, "sample")
        assert model.vocabulary.decode(prompt) == "<|im_start|>user\nthe fox<|im_end|>\n<|im_start|>fox\n"
        (written,) = model.write(prompt, torch.zeros(1).long(), Sampling(0.0), 64)
        outputs.append(written.text)
        assert 2 in model.ends
    assert outputs[0] == outputs[1]
    code = (made / "kd" / "hf" / "README.md").read_text().split("```python\n")[1].split("```")[0]
    code = code.replace("FOLDER", str(made / "kd" / "hf")).replace("TEXT", "the fox")
    printed = io.StringIO()
    scope: dict[str, Any] = {"print": printed.write}
    exec(code, scope)
    assert printed.getvalue() == outputs[0]
    sys.stdin = io.StringIO("the fox\n")
    chat.main(["--run", str(made / "kd"), str(made / "kd" / "hf"), "--temperature", "0", "--max_tokens", "64"])
    with pytest.raises(BadInput):
        model.encode([{"role": "critic", "content": "a"}], "sample")
