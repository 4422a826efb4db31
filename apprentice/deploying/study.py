"""A student in each format: exported, answered for elsewhere, measured, told."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from apprentice.deploying import formats
from apprentice.deploying.agreement import agreement, answers
from apprentice.deploying.latency import Latency
from apprentice.deploying.report import save, text
from apprentice.exports import Spec, write_spec
from apprentice.measuring.kept import Kept

FORMATS = ("float32", "bfloat16", "int8-ptq", "int8-qat")
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

    kept: Kept
    spec: Spec
    images: Tensor
    labels: Tensor

    def run(self, make: Callable[[], Mapping[str, nn.Module]], latency: Latency) -> None:
        """Export, check and measure, unless that is done; print and save what there is to say.

        Args:
            make: makes the net of each format, in eval mode on the CPU; all take float32 images and give logits.
            latency: how to measure it.

        Raises:
            SystemExit: a file does not answer as its net does; its format has no row.
        """
        if set(self.kept.rows) != set(FORMATS):
            self._measure(make(), latency)
        results = self.kept.write(FORMATS)
        notes = [f"{name}: left out: {fault}." for name, fault in self.kept.failed.items()]
        save(self.kept.out, results, notes)
        print(f"{text(results, notes)}\n\n{self.kept.out}/results.md, .png, .json")
        if notes:
            raise SystemExit(1)

    def _measure(self, nets: Mapping[str, nn.Module], latency: Latency) -> None:
        logits = {name: logits_of(net, self.images) for name, net in nets.items()}
        files = {name: self._export(name, net) for name, net in nets.items()}
        found = answers([path for paths in files.values() for path in paths], self.images)
        checks = {
            path: agreement(logits[name], found[path], exact=name == "float32")
            for name, paths in files.items()
            for path in paths
        }
        times = latency.measure(nets, self.images)
        for name, paths in files.items():
            if faults := [f"{path.name}: {checks[path].fault}" for path in paths if checks[path].fault]:
                self.kept.failed[name] = "; ".join(faults)
            else:
                self.kept.rows[name] = self._row(name, logits, paths, times[name])

    def _row(
        self, name: str, logits: Mapping[str, Tensor], files: list[Path], times: dict[str, dict[str, float]]
    ) -> dict[str, Any]:
        correct = int((logits[name].argmax(1) == self.labels).sum())
        counted = next(path for path in files if path.name == (formats.WEIGHTS if name == "bfloat16" else formats.ONNX))
        largest = max(times, key=int)
        return {
            "format": name,
            "test_acc": correct / len(self.labels),
            "test_correct": correct,
            "bytes": counted.stat().st_size,
            "latency_ms": times,
            "images_per_second": int(largest) / times[largest]["median"] * 1e3,
            "max_logit_difference": float((logits[name] - logits["float32"]).abs().max()),
            "files": [str(path.relative_to(self.kept.out)) for path in files],
        }

    def _export(self, name: str, net: nn.Module) -> list[Path]:
        folder = self.kept.out / name
        folder.mkdir(exist_ok=True)
        written = [formats.PROGRAM]
        formats.write_program(net, self.images, folder)
        if not name.startswith("int8"):
            write_spec(self.spec, folder)
            formats.write_weights(net.net if isinstance(net, formats.Rounded) else net, folder)
            written.append(formats.WEIGHTS)
        if name != "bfloat16":  # onnxruntime has no kernels for it on CPUs
            formats.write_onnx(net, self.images, folder)
            written.append(formats.ONNX)
        return [folder / file for file in written]


@torch.no_grad()
def logits_of(net: nn.Module, images: Tensor) -> Tensor:
    """Logits (N, classes) of images (N, C, H, W)."""
    return torch.cat([net(batch) for batch in images.split(BATCH)])
