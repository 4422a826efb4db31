"""What deploys a student, by itself: what agrees, what is timed, which files are ours, what each file costs."""

import copy
import itertools
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from apprentice import extras
from apprentice.errors import BadInput
from apprentice.keyed import with_seed
from benchmarks.int8_speed import VNNI
from deploy import infer, latency, verify, writers
from deploy.agreement import Difference, compare, disagreement
from deploy.export_folder import ONNX, PROGRAM, WEIGHTS
from deploy.int8 import FakeQuantized
from deploy.int8.builder import NetDescription, of_net
from deploy.int8.report import FormatRow, differences
from deploy.int8.study import Study
from deploy.latency import Latency
from deploy.verify import read_back
from harness.runs import folders
from harness.runs.facts import spec
from harness.runs.nets import save_net
from lit_modules.nets import Ensemble, LightNN, ResNet
from tests.net_facts import facts
from tests.processes import Run
from tests.training import SHAPE, net

pytestmark = pytest.mark.usefixtures("one_thread")
needs_extras = pytest.mark.extras


def test_what_is_said_of_a_net_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with of_net("run", "FOLDER", "net"):
        sys.stderr.write("noted\n")
    said = "run FOLDER: expected a net that can be quantised; it says: KeyError: 'a graph'"
    with pytest.raises(BadInput, match=said), of_net("run", "FOLDER", "net"):
        raise KeyError(sys.stderr.write("a whole graph\n") and "a graph")
    with pytest.raises(BadInput, match="run FOLDER: expected another"), of_net("run", "FOLDER", "net"):
        raise BadInput("net", "LightNN", "another")
    with pytest.raises(BadInput, match="objective Hint: expected another"), of_net("run", "FOLDER", "net"):
        raise BadInput("objective", "Hint", "another")
    assert capsys.readouterr().err == "noted\n"


def test_agreement_allows_what_rounding_explains_and_no_more() -> None:
    logits = torch.zeros(2000, 3)
    logits[:, 0], logits[0, 1], logits[0, 2] = 10.0, 10.0 - 1e-5, -10.0
    flipped = logits.clone()
    flipped[0, 0] -= 1e-4
    assert (logits.argmax(1) != flipped.argmax(1)).sum() == 1
    assert not disagreement(logits, flipped, exact=True)
    assert not disagreement(logits, flipped, exact=False)
    logits[0, 1] = 10 - 0.3
    flipped[0, 1] = 10.1
    assert "0.3 apart, not below 0.0001" in disagreement(logits, flipped, exact=True)
    assert not disagreement(logits, flipped, exact=False)  # 0.3 of a range of 20
    logits[:3, 1] = 9.7
    flipped[:3] = torch.tensor([9.7, 10.0, -10.0])
    assert "3 of 2000 predictions differ" in disagreement(logits, flipped, exact=False)
    logits[0, 1] = 10 - 0.5
    assert "not below 0.4" in disagreement(logits, flipped, exact=False)
    assert "a logit differs by 1, more than 0.1% of their range" in disagreement(logits, logits + 1, exact=True)
    assert disagreement(logits, logits * torch.nan, exact=False) == "its logits are not finite"


def test_latency_is_told_of_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, int]] = []

    def net(name: str) -> Any:
        return lambda images: calls.append((name, len(images)))

    monkeypatch.setattr(latency, "compile_whole", lambda net, batch, exact: net)
    found = Latency(threads=1, batch_sizes=[3], repeats=2).measure({"a": net("a"), "b": net("b")}, torch.zeros(2, 1))
    turns = [name for name, _ in itertools.groupby(name for name, _ in calls)]
    assert turns == ["a", "b"] * 3  # to warm up, and twice
    assert {rows for _, rows in calls} == {3}
    assert set(found["a"]["3"]) == {"median", "p95"}
    with pytest.raises(BadInput, match="repeats"):
        Latency(repeats=0)


class Awkward(torch.nn.Module):
    """A graph can't hold it, or it answers otherwise where it is compiled."""

    def __init__(self, breaks: bool) -> None:
        super().__init__()
        self.breaks = breaks

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if self.breaks:
            torch._dynamo.graph_break()
        return images.flip(1) if torch.compiler.is_compiling() and not self.breaks else images * 2


@pytest.mark.slow
def test_what_is_not_compiled_as_it_is_told_is_not_timed(tmp_path: Path) -> None:
    Run(timed, log=tmp_path / "log").check()


def timed() -> None:
    failed: dict[str, str] = {}
    torch._dynamo.config.recompile_limit = 1  # as after 8 sizes
    nets = {"good": torch.nn.ReLU(), "broken": Awkward(True), "wrong": Awkward(False)}
    images = torch.eye(4).add(torch.tensor([0.0, 0.1, 0.2, 0.3]))
    measure = Latency(threads=1, batch_sizes=[2, 3, 4], repeats=1).measure
    found = measure(nets, images, lambda error, name: failed.update({name: str(error)}))
    assert {name: list(times) for name, times in found.items()} == {"good": ["2", "3", "4"], "broken": [], "wrong": []}
    assert failed["broken"].startswith("Inductor can't compile it as a whole: Unsupported: ")
    assert failed["wrong"].startswith("compiled it answers otherwise: a prediction differs")
    with pytest.raises(RuntimeError, match="as a whole"):
        measure({"broken": nets["broken"]}, images)


def test_a_missing_compiler_is_one_line() -> None:
    from torch._inductor import config

    latency.need_compiler()
    missing = config.patch("cpp.cxx", ("no-such-compiler",))  # monkeypatch would delete the setting in the end
    with missing, pytest.raises(extras.Missing, match=r"C\+\+ compiler: expected one"):
        latency.need_compiler()


def test_only_our_own_files_are_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "bfloat16"
    folder.mkdir()
    for name in ("notes.txt", "weights.safetensors", "model.pt2", "../results.json"):
        (folder / name).touch()
    with pytest.raises(BadInput, match=r"this one holds results\.json"), folders.open_folder(tmp_path):
        pass
    monkeypatch.setattr(writers, "WRITERS", dict.fromkeys((PROGRAM, WEIGHTS), lambda net, example, folder, facts: None))
    study = Study.__new__(Study)
    study.out, study.saved, study.images = tmp_path, NetDescription({}, facts()), torch.zeros(1)
    (tmp_path / "unfinished").mkdir()
    written = study._export("bfloat16", torch.nn.ReLU(), tmp_path / "unfinished")
    assert written == [tmp_path / "unfinished" / name for name in ("model.pt2", "weights.safetensors")]
    assert {path.name for path in (tmp_path / "unfinished").iterdir()} == {"net.yaml"}
    study._remove_others({folder / "model.pt2"})
    assert {path.name for path in folder.iterdir()} == {"notes.txt", "model.pt2"}


@pytest.mark.slow
@needs_extras
def test_files_of_a_net_with_folded_batch_norm_answer_as_it_does(tmp_path: Path) -> None:
    images = torch.randn(64, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    fake = FakeQuantized(with_seed(0, lambda: ResNet(8, (3, 8, 8))), images[:1]).train()
    with torch.no_grad():
        fake(images)
        int8 = fake.eval().int8()
        logits = int8(images)
    writers.write_program(int8, images, tmp_path)
    writers.write_onnx(int8, images, tmp_path)
    found = read_back([tmp_path / PROGRAM.name, tmp_path / ONNX.name], images)
    assert len(found) == 2
    for path, given in found.items():
        assert isinstance(given, torch.Tensor), given
        assert not disagreement(
            logits, given, exact=False, share=1
        )  # untrained, the two highest are often nearly equal
        # Without VNNI int8 kernels of onnxruntime add in 16 bits: see docs/int8.md.
        read = given if VNNI or path.name != ONNX.name else _without_int8_kernels(path, images)
        assert float((logits - read).abs().max()) < 0.02 * float(logits.max() - logits.min())


def _without_int8_kernels(path: Path, images: torch.Tensor) -> torch.Tensor:
    """Logits of a file by kernels of floats between its roundings."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    (logits,) = session.run(None, {session.get_inputs()[0].name: images.numpy()})
    return torch.from_numpy(logits)


@pytest.mark.slow
@needs_extras
def test_weights_of_a_net_that_pythonpath_leads_to_are_answered_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "nets_of_mine.py").write_text("from lit_modules.nets import LightNN as Mine\n")
    monkeypatch.syspath_prepend(tmp_path / "elsewhere")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    plain, images = net(LightNN).eval(), torch.randn(3, 1, 8, 8)
    save_net(plain, spec("nets_of_mine.Mine", {"input_shape": [1, 8, 8]}), tmp_path, facts())
    writers.write_weights(plain, None, tmp_path, facts())
    (answer,) = read_back([tmp_path / WEIGHTS.name], images).values()
    assert isinstance(answer, torch.Tensor), answer
    assert torch.equal(answer, plain(images))


def test_how_a_file_differs_is_counted_and_told() -> None:
    logits = torch.eye(4)
    other = logits[[1, 0, 2, 3]] + 0.5
    assert compare(logits, logits) == Difference(0, 0.0)
    difference = compare(logits, other)
    assert difference == Difference(2, 1.5)
    told = {"model.pt2": {"predictions": 0, "max_logit_difference": 0.1}, "model.onnx": vars(difference)}
    row = FormatRow("int8-ptq", 0.5, 2, 1, {}, None, 0.0, [], told)
    expected = "int8-ptq/model.onnx: 2 of 4 predictions are others than the net's; its logits differ by up to 1.5."
    assert [*differences(row, 4)] == [expected]


DYING = """
import importlib.util, json, os, sys, time

spec = importlib.util.spec_from_file_location("infer", "{}")
infer = importlib.util.module_from_spec(spec)
spec.loader.exec_module(infer)
kept = infer.onnx


def killed(path, logits):
    with open(path, "wb") as file:
        file.write(b"half")
    os._exit(9)


def onnx(path):
    if "hanging" in path:
        time.sleep(60)
    if "deadly" in path:
        infer.np.save = killed
    return kept(path.replace("deadly", "good"))


infer.onnx = onnx
with open(sys.argv[1]) as job:
    infer.main(json.load(job))
"""


@pytest.mark.slow
@needs_extras
def test_each_file_stands_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images, plain = torch.randn(3, 1, 8, 8), net(LightNN).eval()
    files = [tmp_path / name / "model.onnx" for name in ("broken", "deadly", "hanging", "bfloat16", "good")]
    for path in files:
        path.parent.mkdir()
    files[0].write_bytes(b"nothing")
    (tmp_path / "infer.py").write_text(DYING.format(infer.__file__))
    monkeypatch.setattr(infer, "__file__", str(tmp_path / "infer.py"))
    monkeypatch.setattr(verify, "SECONDS", 10.0)
    writers.write_onnx(writers.RoundedNet(copy.deepcopy(plain), torch.bfloat16), images, files[3].parent)
    writers.write_onnx(plain, images, files[4].parent)
    found = read_back(files, images)
    assert list(found) == files
    reasons = "InvalidProtobuf: ", "its process ended with exit code 9", "its process took too long", "InvalidGraph: "
    for path, said in zip(files, reasons, strict=False):
        told = found[path]
        assert isinstance(told, str)
        assert told.startswith(said)
        assert len(told.splitlines()) == 1
    torch.testing.assert_close(found[files[4]], plain(images).detach(), rtol=0, atol=1e-5)


@pytest.mark.extras("safetensors")
def test_weights_that_share_memory_are_written_each(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    tied = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False))
    weight: Any = tied[0].weight
    tied[1].weight = weight
    writers.write_weights(tied, None, tmp_path)
    state = load_file(tmp_path / WEIGHTS.name)
    assert all(torch.equal(value, weight) for value in state.values())
    assert len(state) == 2


@pytest.mark.parametrize("average", ["probabilities", "logits"])
def test_a_weighted_ensemble_is_exported_for_batches_of_any_size(average: Any) -> None:
    ensemble = Ensemble([net(seed=1), net(seed=2)], [3, 1], average)
    program = writers._export(ensemble, torch.rand(2, *SHAPE)).module()
    images = torch.rand(5, *SHAPE)
    torch.testing.assert_close(program(images), ensemble(images), rtol=1e-5, atol=1e-5)
