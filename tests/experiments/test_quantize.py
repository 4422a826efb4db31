"""From a run's folder to files that answer elsewhere: the page that tells how, what it leaves, what is refused."""

import os
import re
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from apprentice import extras
from datamodules import ImageData
from deploy import latency, writers
from deploy.export_folder import ONNX
from deploy.int8.options import data_of_run
from deploy.int8.report import FormatRow
from deploy.int8.study import Study
from experiments import kd, quantize
from harness.runs.facts import NetFacts
from harness.runs.nets import save_net
from lit_modules.nets import LightNN, ResNet
from tests.commands import Refusal, left_by_overwriting, results
from tests.deploy import exporting
from tests.experiments.test_documented import start_fresh
from tests.processes import Run
from tests.training import net

ROOT = Path(__file__).parents[2]
FORMATS = ["float32", "bfloat16", "int8-ptq", "int8-qat"]
COLUMNS = {
    "format", "test_acc", "test_correct", "bytes", "latency_ms", "images_per_second", "max_logit_difference", "files",
    "file_differences",
}  # fmt: skip
LEFT = {
    "float32": {"weights.safetensors", "model.pt2", "model.onnx"},
    "bfloat16": {"weights.safetensors", "model.pt2"},
    "int8-ptq": {"model.pt2", "model.onnx"},
    "int8-qat": {"model.pt2", "model.onnx"},
}
QUICK = ["--latency.repeats", "3", "--latency.batch_sizes", "16", "--trainer.devices", "2"]
pytestmark = pytest.mark.usefixtures("one_thread")
needs_extras = pytest.mark.extras


def blocks(language: str) -> list[str]:
    page = (ROOT / "docs" / "int8.md").read_text()
    return re.findall(rf"^```{language}\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)


def follow(folder: Path) -> None:
    """The page's commands, in their order, int8 in a fresh process, which starts two; shortened."""
    os.chdir(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for line in "".join(blocks("bash")).splitlines():
            if line.startswith("python experiments/"):
                script, *flags = line.removeprefix("python experiments/").split()
                if script == "quantize.py":
                    start_fresh("quantize", [*flags, *QUICK], folder)
                else:
                    kd.main([*flags, "--trainer.max_epochs", "2"])
        for block in blocks("python"):
            variables: dict[str, Any] = {}
            exec(compile(block, "int8.md", "exec"), variables)
            assert tuple(variables["logits"].shape) == (5, 10)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("deploy")
    Run(follow, folder, log=folder / "log").check()
    return folder


@needs_extras
@pytest.mark.slow
def test_the_page_leaves_what_it_says(run: Path) -> None:
    found = results(run / "runs" / "int8")
    assert found["experiment"] == "quantize"
    assert [row["format"] for row in found["rows"]] == FORMATS
    for row in found["rows"]:
        assert set(row) == COLUMNS
        assert {Path(file).name for file in row["files"]} == LEFT[row["format"]]
        assert all((run / "runs" / "int8" / file).is_file() for file in row["files"])
        assert row["test_acc"] == row["test_correct"] / 360
        assert set(row["latency_ms"]) == {"16"}
        assert all(0 < times["median"] <= times["p95"] for times in row["latency_ms"].values())
        assert row["images_per_second"] == pytest.approx(16e3 / row["latency_ms"]["16"]["median"])
        assert (row["max_logit_difference"] > 0) == (row["format"] != "float32")
        counted = "weights.safetensors" if row["format"] == "bfloat16" else "model.onnx"
        assert row["bytes"] == (run / "runs" / "int8" / row["format"] / counted).stat().st_size
    sizes = {row["format"]: row["bytes"] for row in found["rows"]}
    assert sizes["int8-qat"] <= 0.375 * sizes["float32"]
    assert found["data"] == {"name": "Digits", "train": 1293, "validation": 144, "test": 360}
    taught = results(run / "runs" / "digits")["students"]["kd"]
    assert found["rows"][0]["test_correct"] == taught["test_correct"][0]
    files = ("report.html", "results.md", "results.png", "config.yaml", "environment.json", "seed0/int8-qat/best.pt")
    for name in files:
        assert (run / "runs" / "int8" / name).stat().st_size > 0
    report = (run / "runs" / "int8" / "report.html").read_text()
    assert "quantize.py " in report.partition("The command that repeats it")[2]
    best = torch.load(run / "runs" / "int8" / "seed0" / "int8-qat" / "best.pt", weights_only=True)
    assert best["net"]["class_path"] == "lit_modules.nets.LightNN"
    assert 0 <= best["epoch"] < 5
    assert best["state_dict"]
    assert found["failed"] == {}
    assert found["hardware"]["threads"] == 1
    page = (run / "runs" / "int8" / "results.md").read_text()
    assert all(f"| {name} |" in page for name in FORMATS)


@needs_extras
@pytest.mark.slow
def test_int8_files_have_int8_weights_and_qdq(run: Path) -> None:
    import onnx

    model = onnx.load(run / "runs" / "int8" / "int8-qat" / "model.onnx")
    kinds = [node.op_type for node in model.graph.node]
    assert "QuantizeLinear" in kinds
    assert "DequantizeLinear" in kinds
    stored = {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    weights = [t for t in model.graph.initializer if t.data_type == onnx.TensorProto.INT8 and len(t.dims) > 1]
    assert len(weights) == 4, stored
    (images,) = model.graph.input
    assert images.type.tensor_type.elem_type == onnx.TensorProto.FLOAT
    assert images.type.tensor_type.shape.dim[0].dim_param


@needs_extras
@pytest.mark.slow
def test_a_finished_run_is_told_again(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(run / "runs" / "int8", out)
    before = results(out)
    unfinished = out / "seed0" / "int8-qat.ckpt"  # as of a process that was killed before it took it away
    unfinished.touch()
    assert "epoch" not in Run(resume, run, out, log=tmp_path / "log").check()
    assert results(out)["rows"] == before["rows"]
    assert not unfinished.exists()
    assert left_by_overwriting(out, tmp_path) == set()


def test_a_format_whose_file_was_deleted_is_not_done(tmp_path: Path) -> None:
    study = Study.__new__(Study)
    study.out = tmp_path
    row = FormatRow("bfloat16", 1.0, 1, 1, {}, None, 0.0, ["bfloat16/model.pt2", "bfloat16/weights.safetensors"])
    (tmp_path / "bfloat16").mkdir()
    for file in row.files:
        assert not study._has_files(row)
        (tmp_path / file).touch()
    assert study._has_files(row)


def resume(run: Path, out: Path) -> None:
    os.chdir(run)
    quantize.main(["--out", str(out), "--resume", "true"])


@pytest.mark.slow
@needs_extras
def test_a_fresh_student_with_a_file_that_is_broken_and_one_that_can_not_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, kept = tmp_path / "out", writers.write_onnx

    def compiled(net: Any, batch: torch.Tensor, exact: bool) -> Any:
        """That takes seconds, and is done above."""
        if isinstance(net, writers.RoundedNet) and len(batch) == 2:
            raise RuntimeError("no such kernel")
        return net

    monkeypatch.setattr(latency, "compile_whole", compiled)

    def write_onnx(net: Any, example: torch.Tensor, folder: Path, facts: NetFacts) -> None:
        kind = folder.parent.name  # it is written in a temporary folder there
        if kind == "int8-ptq":
            raise RuntimeError("no such operator")
        if kind == "float32":
            (folder / "model.onnx").write_bytes(b"nothing")
        else:
            kept(net, example, folder, facts)

    monkeypatch.setitem(writers.WRITERS, ONNX, write_onnx)
    exporting.read_here(monkeypatch)
    command = Run(fresh, out, log=tmp_path / "log")
    command.check(1)
    rows = {row["format"]: row for row in results(out)["rows"]}
    assert list(rows) == FORMATS
    assert {name: {Path(file).name for file in row["files"]} for name, row in rows.items()} == {
        name: files - ({"model.onnx"} if name in {"float32", "int8-ptq"} else set()) for name, files in LEFT.items()
    }
    assert rows["float32"]["bytes"] is None
    assert rows["int8-ptq"]["bytes"] is None
    assert (rows["bfloat16"]["latency_ms"], rows["bfloat16"]["images_per_second"]) == ({}, None)
    assert set(rows["int8-qat"]["latency_ms"]) == {"1", "2"}
    for fault in (
        "float32/model.onnx is left out: ",
        "int8-ptq/model.onnx is left out: RuntimeError: no such operator",
        "bfloat16/latency is left out: RuntimeError: no such kernel",
    ):
        assert fault in command.output
        assert fault in (out / "results.md").read_text()
        file, _, why = fault.partition(" is left out: ")
        assert results(out)["failed"][file].startswith(why)
    assert (out / "seed0" / "student" / "weights.pt").is_file()
    monkeypatch.setattr(Study, "_measure", lambda _study, nets: print("once more:", *nets))
    again = Run(fresh, out, "--resume", "true", log=tmp_path / "again")
    again.check()
    assert f"once more: {' '.join(FORMATS)}" in again.output
    assert "epoch" not in again.output


def fresh(out: Path, *more: str) -> None:
    sizes = ["--data.train_size", "100", "--data.test_size", "100", "--data.validation_size", "20"]
    epochs = ["--student_epochs", "1", "--trainer.max_epochs", "2", "--freeze_epoch", "1"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantize.main([
            *sizes, *epochs, "--latency.repeats", "1", "--latency.batch_sizes", "1", "2", "--out", str(out), *more,
        ])  # fmt: skip


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder as kd.py leaves it, untrained."""
    folder = tmp_path_factory.mktemp("run") / "seed0" / "kd"
    arguments = {"input_shape": [1, 8, 8], "num_classes": 10, "dropout": 0.1}
    save_net(net(LightNN), {"class_path": "lit_modules.nets.LightNN", "init_args": arguments}, folder)
    return folder


@needs_extras
@pytest.mark.parametrize("flags", [["--student", "DeepNN"], ["--student_epochs", "3"]])
def test_a_run_has_its_student(flags: list[str], student: Path, refusal: Refusal) -> None:
    line = refusal(quantize.main, *flags, "--run", student, "--data", "Digits")
    assert line.startswith(" ".join(flags))
    assert "not allowed with --run" in line


@needs_extras
@pytest.mark.parametrize("whose", ["student", "teacher"])
def test_a_layer_that_a_net_has_not_is_the_objectives(whose: str, student: Path, refusal: Refusal) -> None:
    flag = f"--objective.{whose}_layer"
    flags = ["--data", "Digits", "--teacher", student, "--objective", "Cosine", flag, "none"]
    line = refusal(quantize.main, "--run", student, *flags)
    assert line.startswith(f"{flag} none")
    assert "a layer of LightNN" in line


def test_a_student_is_quantised_on_the_data_of_its_run(
    student: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: Refusal
) -> None:
    settings = {"data": {"class_path": "datamodules.Digits", "init_args": {"train_size": 200, "partition": None}}}
    (student.parent.parent / "config.yaml").write_text(yaml.safe_dump(settings))
    flags = ["--run", str(student), "--data.test_size", "50"]
    chosen = parsed(flags).data.init_args
    assert (chosen["train_size"], chosen["test_size"], chosen["partition"]) == (200, 50, None)
    own = tmp_path / "own.yaml"
    own.write_text(yaml.safe_dump({"run": str(student), "data": {"test_size": 60}}))
    chosen = parsed(["--config", str(own)]).data.init_args
    assert (chosen["train_size"], chosen["test_size"]) == (200, 60)
    out = tmp_path / "out"
    out.mkdir()
    settled = parsed([*flags, "--data.validation_size", "9"])
    (out / "config.yaml").write_text(quantize.parser().dump(settled, of_run=True))
    chosen = parsed(["--run", str(student), "--out", str(out), "--resume", "true"]).data.init_args
    assert (chosen["train_size"], chosen["test_size"], chosen["validation_size"]) == (200, 50, 9)
    monkeypatch.chdir(student)
    assert parsed(["--run", "."]).data.init_args["train_size"] == 200
    text = {"class_path": "datamodules.Text", "init_args": {"train_size": 5}}
    (student.parent.parent / "config.yaml").write_text(yaml.safe_dump({"data": text}))
    line = refusal(quantize.main, "--run", ".")
    assert line.startswith("--run .")
    assert line.endswith("its run's data is datamodules.Text")
    (student.parent.parent / "config.yaml").unlink()


def test_a_run_s_folder_in_place_of_a_net_s_names_the_nets(tmp_path: Path, refusal: Refusal) -> None:
    run = tmp_path / "run"
    for name in ("kd", "teacher"):
        (run / "seed0" / name).mkdir(parents=True)
        (run / "seed0" / name / "net.yaml").write_text("")
    line = refusal(quantize.main, "--run", run)
    assert line.startswith(f"--run {run}: expected a net's folder")
    assert line.endswith(f"; or --data, what it learnt from; there: {run}/seed0/kd, {run}/seed0/teacher")


def parsed(flags: list[str]) -> Any:
    return quantize.parser(data_of_run(flags, "Digits", ImageData)).parse(flags)


@needs_extras
def test_weights_that_do_not_fit_are_refused(student: Path, tmp_path: Path, refusal: Refusal) -> None:
    other = tmp_path / "other"
    shutil.copytree(student, other)
    spec, whole = (other / "net.yaml").read_text(), (other / "weights.pt").read_bytes()
    settings, larger = yaml.safe_load(spec), {"depth": 8, "input_shape": [1, 16, 16], "num_classes": 10}

    def says(expected: str, net: str | dict[str, Any] = spec, weights: bytes = whole) -> None:
        (other / "net.yaml").write_text(net if isinstance(net, str) else yaml.safe_dump(net))
        (other / "weights.pt").write_bytes(weights)
        line = refusal(quantize.main, "--run", other, "--data", "Digits")
        assert line.startswith(f"--run {other}")
        assert expected in line

    says("missing: features.2.weight, features.2.bias, features.5", spec.replace("LightNN", "DeepNN"))
    says("cut short", weights=whole[: len(whole) // 2])
    says("its first is 9, and not 0", {**settings, "classes": [*"9876543210"]})
    says("whose net.yaml can be read", {"class_path": "lit_modules.nets.ResNet", "init_args": [21]})
    resnet = {"class_path": "lit_modules.nets.ResNet", "init_args": larger}
    save_net(ResNet(**larger), resnet, other)  # it could take others, too
    says("(1, 8, 8), as this data has them", (other / "net.yaml").read_text(), (other / "weights.pt").read_bytes())


@pytest.mark.parametrize(
    ("package", "extra"), [("torchao", "quant"), pytest.param("onnxscript", "export", marks=needs_extras)]
)
def test_a_missing_extra_is_one_line(
    package: str, extra: str, refusal: Refusal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    line = refusal(quantize.main)
    assert line.startswith(package)
    assert extras.install_command(extra) in line
