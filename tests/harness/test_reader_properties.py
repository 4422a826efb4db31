"""Whatever a file holds, its reader takes it or refuses it in one line."""

import io
import json
import os
import shutil
import struct
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import datamodules
from apprentice.errors import BadInput
from experiments import compare
from harness.cli.messages import one_line_errors
from harness.runs import files, folders, safepoints
from harness.runs.facts import spec
from harness.runs.nets import load_net, save_net
from harness.runs.records import FORMAT, FitRecord
from harness.studies.text.vocabularies import read_vocabulary
from lit_modules.nets import LightNN
from lit_modules.nets.weights import load_weights
from tests.bake_off_facts import results as bake_off

SHAPE = {"input_shape": (1, 8, 8), "num_classes": 10}
some = settings(
    max_examples=100, deadline=None, derandomize=True, database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)  # fmt: skip
numbers = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
values = st.recursive(
    numbers, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """A file cut off, or with some bytes changed, left out or put in."""
    found = bytearray(content[: draw(st.integers(0, len(content)))] if draw(st.booleans()) else content)
    for place in draw(st.lists(st.integers(0, max(len(found) - 1, 0)), max_size=3)):
        found[place : place + draw(st.integers(0, 2))] = draw(st.binary(max_size=3))
    return bytes(found)


@st.composite
def changed(draw: st.DrawFn, value: Any) -> Any:
    """The JSON or YAML value with one of its parts replaced, left out or renamed."""
    if not isinstance(value, dict | list) or not value or draw(st.integers(0, 5)) == 0:
        return draw(values)
    copy: Any = dict(value) if isinstance(value, dict) else list(value)
    key = draw(st.sampled_from(sorted(value) if isinstance(value, dict) else range(len(value))))
    action = draw(st.sampled_from(["within", "within", "within", "without", "renamed"]))
    if action == "within":
        copy[key] = draw(changed(value[key]))
    elif action == "renamed" and isinstance(copy, dict):
        copy[draw(st.text(max_size=5))] = copy.pop(key)
    else:
        del copy[key]
    return copy


def contents(valid: bytes, value: Any = None) -> st.SearchStrategy[bytes]:
    """Bytes at random, a damaged file and, if it has a `value`, JSON or YAML of another shape."""
    found = st.binary(max_size=200) | damaged(valid)
    if value is not None:
        found = found | (changed(value) | values).map(lambda other: json.dumps(other).encode())
    return found | st.sampled_from([b"", b"[" * 20000, b'{"a":' * 20000, b"9" * 5000])


@contextmanager
def refused(errors: Callable[[], AbstractContextManager[None]] = one_line_errors) -> Iterator[None]:
    """The block ends well, or with one line for the user."""
    said, code = io.StringIO(), 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stderr", said)
        patch.setattr("sys.stdout", io.StringIO())
        try:
            with errors():
                yield
        except SystemExit as stop:
            code = stop.code
    line = said.getvalue()
    assert (code, line) == (0, "") or (code == 2 and line.startswith("error: ") and line.find("\n") == len(line) - 1)


def saved(value: Any) -> bytes:
    torch.save(value, file := io.BytesIO())
    return file.getvalue()


WEIGHTS = LightNN(**SHAPE).state_dict()
RUN = {
    "objective": "Hinton", "parameters": 5, "test_acc": 0.5, "test_correct": 10, "step_ms": 1.5, "train_flops": None,
    "failed": None, "trained_epochs": 2.0, "epochs": [],
}  # fmt: skip
NETS = {"teacher": RUN, "kd": {**RUN, "failed": {"step": 3, "term": "loss"}}}
RECORD = {"format": FORMAT, "fit_seconds": 1.5, "max_epochs": 2, "nets": NETS}
POINT = {
    "state_dict": WEIGHTS, "optimizer_states": [], "lr_schedulers": [], "loops": {"fit_loop": {}}, "global_step": 3,
    "callbacks": {"SafePoints": {"seconds": 1.0, "finished": False}}, "pytorch-lightning_version": "2",
}  # fmt: skip
SPEC = spec("lit_modules.nets.LightNN", SHAPE)
VOCABULARY = {"characters": "abc"}


@pytest.fixture
def net(tmp_path: Path) -> Path:
    """A net's folder."""
    save_net(LightNN(**SHAPE), SPEC, tmp_path / "net")
    return tmp_path / "net"


@some
@given(contents(json.dumps(RECORD).encode(), RECORD))
def test_records(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "teacher.json"
    path.write_bytes(content)
    with refused():
        for net in FitRecord.read(path).nets.values():
            assert (
                0.0 + sum(net.figures.get(key) or 0.0 for key in ("parameters", "step_ms", "train_flops")) is not None
            )


@some
@given(contents(saved(POINT)))
def test_checkpoints(tmp_path: Path, content: bytes) -> None:
    path, module = tmp_path / "teacher.ckpt", LightNN(**SHAPE)
    path.write_bytes(content)
    with refused():
        module.load_state_dict(safepoints.read(path)["state_dict"])


@some
@given(contents(saved(WEIGHTS)))
def test_weights(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "weights.pt"
    path.write_bytes(content)
    with refused():
        load_weights(LightNN(**SHAPE), str(path), "teacher_ckpt")


KINDS: dict[str, Callable[[torch.Tensor], Any]] = {
    "sparse": torch.Tensor.to_sparse, "meta": lambda x: x.to("meta"), "whole numbers": torch.Tensor.int,
    "complex": lambda x: x.to(torch.complex64), "of another shape": lambda x: x[None], "NaN": lambda x: x * torch.nan,
    "no tensors": torch.Tensor.tolist,
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_weights_of_other_kinds(kind: str, net: Path, capfd: pytest.CaptureFixture[str]) -> None:
    torch.save({key: KINDS[kind](value) for key, value in WEIGHTS.items()}, net / "weights.pt")
    with pytest.raises(BadInput):
        load_net(net)
    with pytest.raises(BadInput):
        load_weights(LightNN(**SHAPE), str(net / "weights.pt"), "teacher_ckpt")
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("state", [{0: torch.ones(2)}, {("a", "b"): torch.ones(2)}, {}, None, [1], torch.ones(2)])
def test_what_is_no_state_dict(state: Any, tmp_path: Path) -> None:
    torch.save(state, tmp_path / "weights.pt")
    for wrapped in (state, {"state_dict": state}):
        torch.save(wrapped, tmp_path / "weights.pt")
        with pytest.raises(BadInput):
            load_weights(LightNN(**SHAPE), str(tmp_path / "weights.pt"), "teacher_ckpt")


def test_one_changed_bit_is_found(tmp_path: Path) -> None:
    content = bytearray(saved(WEIGHTS))
    place = content.find(WEIGHTS["features.0.bias"].numpy().tobytes())
    content[place] ^= 1
    (tmp_path / "weights.pt").write_bytes(content)
    with pytest.raises(BadInput, match="it is damaged in "):
        load_weights(LightNN(**SHAPE), str(tmp_path / "weights.pt"), "teacher_ckpt")


@some
@given(contents(yaml.safe_dump(SPEC).encode(), SPEC))
def test_specifications_of_nets(net: Path, content: bytes) -> None:
    (net / "net.yaml").write_bytes(content)
    with refused():
        load_net(net)


@some
@given(contents(json.dumps(VOCABULARY).encode(), VOCABULARY))
def test_vocabularies(net: Path, content: bytes) -> None:
    (net / "vocabulary.json").write_bytes(content)
    with refused():
        assert len(read_vocabulary(net)[0]) > 0


RESULTS = json.loads(json.dumps(bake_off().to_json()))


@some
@given(contents(json.dumps(RESULTS).encode(), RESULTS))
def test_results_that_are_compared(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "run").mkdir(exist_ok=True)
    (tmp_path / "run" / "results.json").write_bytes(content)
    with refused(nullcontext):
        compare.main([str(tmp_path / "run"), "--out", str(tmp_path / "compared")])


@some
@given(contents(b'\n"config.yaml"\n"seed0/teacher.json"'))
def test_records_of_files(tmp_path: Path, content: bytes) -> None:
    out = tmp_path / "run"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    (out / files.RECORD).write_bytes(content)
    with refused(), folders.open_folder(out, overwrite=True):
        pass
    os.environ.pop(files.RUN, None)


def idx(shape: tuple[int, ...], data: bytes) -> bytes:
    """A file of MNIST's format."""
    return struct.pack(f">BBBB{len(shape)}I", 0, 0, 8, len(shape), *shape) + data


IMAGES, LABELS = idx((2, 28, 28), bytes(2 * 28 * 28)), idx((2,), bytes([3, 7]))


@some
@given(contents(IMAGES), contents(LABELS))
def test_mnist(tmp_path: Path, images: bytes, labels: bytes) -> None:
    folder = tmp_path / "MNIST" / "raw"
    folder.mkdir(parents=True, exist_ok=True)
    for part in ("train", "t10k"):
        (folder / f"{part}-images-idx3-ubyte").write_bytes(images)
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(labels)
    with refused():
        datamodules.MNIST(tmp_path, validation_size=0).read()


def png() -> bytes:
    from PIL import Image

    Image.new("RGB", (4, 4)).save(file := io.BytesIO(), "png")
    return file.getvalue()


@some
@given(contents(png()))
def test_images(tmp_path: Path, content: bytes) -> None:
    for part in ("train", "test"):
        for name in ("a", "b"):
            path = tmp_path / part / name / "0.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    with refused():
        datamodules.ImageFolder(tmp_path, validation_size=0).setup()


@some
@given(contents("yes\täh\nno\tb\n".encode() * 20))
def test_texts(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "text"
    path.write_bytes(content)
    for data in (
        datamodules.LabelledText(path), datamodules.Shakespeare(path, speakers=2), datamodules.Text(path, block_size=4),
    ):  # fmt: skip
        with refused():
            data.setup()
