"""What net.yaml says of a net, files without it, and weights under the names of the plain net."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torchvision import models

from apprentice.errors import BadInput
from datamodules import Digits, LabelledText
from datamodules.preparation import Preparation
from harness.runs.facts import spec
from harness.runs.nets import load_net, read_classes, read_facts, read_spec, save_net
from lit_modules.nets import LightNN, Net, Timm, Torchvision
from lit_modules.nets.weights import load_weights
from tests.net_facts import facts
from tests.training import SHAPE, assert_same, net

SPEC = spec("lit_modules.nets.LightNN", {"input_shape": SHAPE})


def test_facts_are_read_as_they_were_written(tmp_path: Path) -> None:
    texts = Preparation(kind="bytes", shape=(64,))
    for number, known in enumerate((facts(), facts(classes=(), commit=None), facts(inputs=texts, classes=("è", "b")))):
        folder = tmp_path / str(number)
        save_net(net(LightNN), SPEC, folder, known)
        assert read_facts(folder) == known
        assert read_spec(folder) == SPEC
        assert read_classes(folder) == load_net(folder).class_names == known.classes


def test_a_net_of_an_older_version_loads_without_them(tmp_path: Path) -> None:
    plain = net(LightNN)
    save_net(plain, SPEC, tmp_path)
    for content in (SPEC, {**SPEC, "classes": [*"0123456789"]}):
        (tmp_path / "net.yaml").write_text(yaml.safe_dump(content))
        assert read_facts(tmp_path) is None
        assert_same(load_net(tmp_path).state_dict(), plain.state_dict())


@pytest.mark.parametrize(
    "wrong",
    [
        {"task": "magic"}, {"inputs": {"kind": "sounds", "shape": [1]}}, {"versions": 3}, {"more": 1}, {"inputs": []},
        {"inputs": {"kind": "images", "shape": [1, 8, 8]}}, {"inputs": {"kind": "bytes", "shape": 8}},
    ],
)  # fmt: skip
def test_facts_that_are_none_are_refused(wrong: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "net.yaml").write_text(yaml.safe_dump({**SPEC, **facts().to_plain(), **wrong}))
    with pytest.raises(BadInput, match=r"net\.yaml"):
        read_facts(tmp_path)


def test_data_say_how_their_samples_become_inputs() -> None:
    data = Digits(mean=[0.25], train_size=20, test_size=10)
    assert data.preparation == Preparation(kind="images", shape=(1, 8, 8), mean=(0.25,), std=(0.3759,))
    assert LabelledText(length=9).preparation == Preparation(kind="bytes", shape=(9,))
    images = torch.randint(256, (5, 1, 8, 8), dtype=torch.uint8)
    data.levels = 255
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        assert torch.equal(data.preparation.normalize(images, dtype), data.normalize(images, dtype))

    class OwnWay(Digits):
        def normalize(self, images: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
            return images.float()

    assert OwnWay().preparation == Preparation(kind="tensors", shape=(1, 8, 8))


@pytest.mark.extras("timm")
@pytest.mark.parametrize("library", ["torchvision", "timm"])
def test_weights_load_into_the_plain_net_and_into_ours_whatever_their_names(library: str, tmp_path: Path) -> None:
    size = {"input_shape": (3, 32, 32), "num_classes": 7}
    if library == "timm":
        import timm

        ours: Net = Timm("mobilenetv3_small_050", **size)
        plain = timm.create_model("mobilenetv3_small_050", num_classes=7)
        arguments = {"name": "mobilenetv3_small_050", **size}
    else:
        ours, plain = Torchvision("mobilenet_v3_small", **size), models.mobilenet_v3_small(num_classes=7)
        arguments = {"name": "mobilenet_v3_small", **size}
    save_net(ours, spec(f"lit_modules.nets.{type(ours).__name__}", arguments), tmp_path, facts())
    saved = torch.load(tmp_path / "weights.pt", weights_only=True)
    plain.load_state_dict(saved)
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(plain.eval()(images), ours.eval()(images))
    assert_same(load_net(tmp_path).state_dict(), ours.state_dict())
    again = type(ours)(**arguments)
    load_weights(again, str(tmp_path / "weights.pt"), "teacher_ckpt")
    assert_same(again.state_dict(), ours.state_dict())
    torch.save(ours.state_dict(), tmp_path / "weights.pt")  # as older versions did
    assert_same(load_net(tmp_path).state_dict(), ours.state_dict())


def test_the_page_loads_weights_into_torchvisions_own_net(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "deploy.md").read_text()
    (block,) = (
        code for code in re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL) if "weights.pt" in code
    )
    ours = Torchvision("resnet18")
    save_net(ours, spec("lit_modules.nets.Torchvision", {"name": "resnet18"}), tmp_path / "RUN" / "seed0" / "kd")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(compile(block, "deploy.md", "exec"), names)
    assert_same(names["net"].state_dict(), ours.model.state_dict())
