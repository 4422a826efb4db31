"""What a net computes is told by its class, options, configuration and weights, not by where it lies."""

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from apprentice.errors import BadInput
from apprentice.keyed import with_seed
from experiments import kd
from harness.runs.nets import load_net
from harness.runs.origins import check_origins, write
from lit_modules.nets import Ensemble, ResNet
from lit_modules.nets.identity import Change, Origin, configurations, identify
from lit_modules.nets.other_tokens import OtherTokens, TokenTexts
from tests.chats import rows, write_lines
from tests.language import gpt


class Scaled(nn.Module):
    """A user's own net: what it computes depends on attributes that no state dict has."""

    def __init__(self, scale: float = 1.0, mean: tuple[float, ...] = (0.5,)) -> None:
        super().__init__()
        self.scale, self.mean, self.itself = scale, mean, [self]
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.head(x - torch.tensor(self.mean))


def scaled(**options: Any) -> nn.Module:
    return with_seed(0, lambda: Scaled(**options))


def test_a_net_that_has_run_or_was_copied_is_the_same() -> None:
    net = with_seed(0, lambda: ResNet(8, input_shape=(3, 8, 8), num_classes=4))
    known = identify(net)
    net.eval()(torch.rand(2, 3, 8, 8))
    assert identify(net) == known == identify(copy.deepcopy(net))
    assert identify(scaled()) == identify(scaled())


def test_options_weights_and_buffers_make_another_net() -> None:
    other = scaled()
    with torch.no_grad():
        other.head.bias[0] += 1  # type: ignore[union-attr, operator]
    buffer = scaled()
    buffer.register_buffer("table", torch.ones(2), persistent=False)
    nets = [scaled(), scaled(scale=2.0), scaled(mean=(0.4,)), other, buffer]
    assert len({identify(net) for net in nets}) == len(nets)
    pair = [gpt(seed=1), gpt(seed=2)]
    shares = [Ensemble(pair), Ensemble(pair, [1.0, 2.0]), Ensemble(pair, average="logits")]
    assert len({*map(identify, shares)}) == len(shares)


def test_another_tokenizer_makes_another_teacher() -> None:
    ours, net = TokenTexts([b"a"], list), gpt()
    kinds = [OtherTokens(net, ours, TokenTexts([b"a"], list, content=content)) for content in ("one", "two")]
    assert identify(kinds[0]) != identify(kinds[1])


def test_what_a_run_began_with_is_compared_and_named(tmp_path: Path) -> None:
    before = Origin({"model": {"rope": 1.0, "older": 2}}, "aa")
    assert before.change(Origin({"model": {"rope": 1.0, "newer": 3}}, "aa")) is None
    assert before.change(Origin({"model": {"rope": 2.0}}, "aa")) == Change("rope", 1.0, 2.0)
    assert before.change(Origin({}, "bb")) == Change("the hash of its content", "aa", "bb")
    write(tmp_path, {"teacher": before, "teacher of seed 3": Origin({}, "cc")})
    write(tmp_path, {"student": Origin({"model": {"a": 1}})})
    check_origins(tmp_path, {"teacher": before, "students.new": Origin({}, "dd")}, {})
    line = f"teacher.name here: expected what the run in {tmp_path} began with; rope is 2.0, and was 1.0: take another"
    with pytest.raises(BadInput, match="began with") as caught:
        check_origins(
            tmp_path, {"teacher": Origin({"model": {"rope": 2.0}}, "aa")}, {"teacher": "T", "teacher.name": "here"}
        )
    assert str(caught.value).startswith(line)
    with pytest.raises(BadInput, match=r"^teacher T: .* the hash of its content is c, and was cc"):
        check_origins(tmp_path, {"teacher of seed 3": Origin({}, "c")}, {"teacher": "T"})


@pytest.mark.extras("transformers")
def test_a_configuration_belongs_to_a_teacher(tmp_path: Path, refusal: Any) -> None:
    """Kept responses, a run that grows and a net's folder know the configuration with which they were made."""
    from lit_modules.nets import HuggingFaceLM
    from tests.language_parts import save_llama, save_tokenizer

    folder, moved = tmp_path / "llama", tmp_path / "moved"
    tokens = len(save_tokenizer(folder))
    save_llama(folder, vocab_size=tokens)
    shutil.copytree(folder, moved)

    def known(place: Path) -> str:
        return identify(HuggingFaceLM(str(place), tokens, 64, pretrained=True))

    first = known(folder)
    rebuilt = HuggingFaceLM(str(folder), tokens, 64)
    rebuilt.load_state_dict(HuggingFaceLM(str(folder), tokens, 64, pretrained=True).state_dict())
    assert first == known(moved) == identify(rebuilt)
    data = write_lines(tmp_path / "chat.jsonl", [{"text": row["response"]} for row in rows(12, 4)])
    flags = ["--data", "Chat", "--data.path", str(data), "--data.validation_size", "2", "--data.test_size", "2"]
    flags += ["--data.max_length", "64", "--data.batch_size", "8", "--trainer.max_epochs", "1", "--seeds", "1"]
    flags += ["--teacher", "HuggingFaceLM", "--teacher.name", str(folder), "--teacher.pretrained", "true"]
    flags += ["--student", "GPT", "--student.num_layers", "1", "--student.embed_dim", "8", "--student.num_heads", "1"]
    kd.main([*flags, "--only", "ce", "--out", str(tmp_path / "run")])
    path, name = folder / "config.json", str(folder)
    settings = json.loads(path.read_text())
    ropes = settings.get("rope_parameters", settings)
    path.write_text(json.dumps(settings | {"rope_theta": 20.0, "rope_parameters": {**ropes, "rope_theta": 20.0}}))
    assert known(folder) != first
    line = refusal(kd.main, "--out", str(tmp_path / "run"), "--resume", "true", "--only", "ce", "kd")
    assert f"--teacher.name {name}: expected what the run in {tmp_path / 'run'} began with; rope_" in line
    with pytest.raises(BadInput, match="expected a net's folder, whose configuration is as it was trained; rope_"):
        load_net(tmp_path / "run" / "seed0" / "teacher")
    assert configurations(rebuilt).keys() == {"model"}
