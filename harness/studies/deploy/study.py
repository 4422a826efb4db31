"""A student in each format: exported, answered for elsewhere, measured, told."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from harness.runs.nets import Spec, write_spec
from harness.studies.deploy import formats
from harness.studies.deploy.agreement import agreement, answers
from harness.studies.deploy.latency import Latency
from harness.studies.deploy.report import save, text
from harness.studies.kept import ResumableResults

FILES = {  # of each format; its size is that of the last
    "float32": (formats.PROGRAM, formats.WEIGHTS, formats.ONNX),
    "bfloat16": (formats.PROGRAM, formats.WEIGHTS),
    "int8-ptq": (formats.PROGRAM, formats.ONNX),
    "int8-qat": (formats.PROGRAM, formats.ONNX),
}
BATCH = 256


@dataclass
class Study:
    """A run that is new or goes on.

    Attributes:
        kept: what there is of it, by `format`.
        spec: how to rebuild the float net.
        images: of the test set, normalised, float32 (N, C, H, W).
        labels: theirs, (N,).
    """

    kept: ResumableResults
    spec: Spec
    images: Tensor
    labels: Tensor

    def run(self, make: Callable[[], Mapping[str, nn.Module]], latency: Latency) -> None:
        """Export, check and measure, unless that is done; print and save what there is to say.

        Args:
            make: makes the net of each format, in eval mode on the CPU; all take float32 images and give logits.
            latency: how to measure it.

        Raises:
            SystemExit: a file can't be written, or does not answer as its net does; all else is there.
        """
        if not all(self._whole(name) for name in FILES):
            self._measure(make(), latency)
        self.kept.header["failed"] = self.kept.failed
        results = self.kept.write(FILES)
        notes = [f"{file} is left out: {fault}" for file, fault in self.kept.failed.items()]
        save(self.kept.out, results, notes)
        print(f"{text(results, notes)}\n\n{self.kept.out}/results.md, .png, .json")
        if notes:
            raise SystemExit(1)

    def _whole(self, name: str) -> bool:
        row = self.kept.rows.get(name, {"files": (), "latency_ms": {}})
        return len(row["files"]) == len(FILES[name]) and bool(row["latency_ms"])

    def _measure(self, nets: Mapping[str, nn.Module], latency: Latency) -> None:
        logits = {name: logits_of(net, self.images) for name, net in nets.items()}
        written = [path for name, net in nets.items() for path in self._export(name, net)]
        good = [path for path, found in answers(written, self.images).items() if self._agrees(path, logits, found)]
        times = latency.measure(nets, self.images, lambda error, name: self.kept.fail(error, f"{name}/latency"))
        for name in nets:
            files = [path for path in good if path.parent.name == name]
            self.kept.rows[name] = self._row(name, logits, files, times[name])

    def _export(self, name: str, net: nn.Module) -> list[Path]:
        """Write a format's files; those that are there then, as each stands alone."""
        folder = self.kept.out / name
        folder.mkdir(exist_ok=True)
        for file in FILES[name]:
            (folder / file).unlink(missing_ok=True)
            try:
                if file == formats.PROGRAM:
                    formats.write_program(net, self.images, folder)
                elif file == formats.ONNX:
                    formats.write_onnx(net, self.images, folder)
                else:
                    write_spec(self.spec, folder)
                    formats.write_weights(net.net if isinstance(net, formats.Rounded) else net, folder)
            except Exception as error:  # noqa: BLE001 - whatever an exporter makes of a net that it can't write
                self.kept.fail(error, f"{name}/{file}")
        return [folder / file for file in FILES[name] if (folder / file).exists()]

    def _agrees(self, path: Path, logits: Mapping[str, Tensor], found: Tensor | str) -> bool:
        """Whether a file answers as its net does; if not, why is kept."""
        name = path.parent.name
        fault = found if isinstance(found, str) else agreement(logits[name], found, exact=name == "float32").fault
        if fault:
            self.kept.failed[f"{name}/{path.name}"] = fault
        return not fault

    def _row(
        self, name: str, logits: Mapping[str, Tensor], files: list[Path], times: dict[str, dict[str, float]]
    ) -> dict[str, Any]:
        correct = int((logits[name].argmax(1) == self.labels).sum())
        sized = self.kept.out / name / FILES[name][-1]
        largest = max(times, key=int, default="")
        return {
            "format": name,
            "test_acc": correct / len(self.labels),
            "test_correct": correct,
            "bytes": sized.stat().st_size if sized in files else None,
            "latency_ms": times,
            "images_per_second": int(largest) / times[largest]["median"] * 1e3 if largest else None,
            "max_logit_difference": float((logits[name] - logits["float32"]).abs().max()),
            "files": [str(path.relative_to(self.kept.out)) for path in files],
        }


@torch.no_grad()
def logits_of(net: nn.Module, images: Tensor) -> Tensor:
    """Logits (N, classes) of images (N, C, H, W)."""
    return torch.cat([net(batch) for batch in images.split(BATCH)])
