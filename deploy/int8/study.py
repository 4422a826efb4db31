"""The study of int8: a student in each number format, written, read again and measured."""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from deploy.agreement import Difference, compare
from deploy.export_folder import FORMATS, WEIGHTS
from deploy.int8 import EXTRA as INT8_EXTRA
from deploy.int8.builder import NetDescription
from deploy.int8.report import FormatRow, differences, report
from deploy.latency import Latency, Times
from deploy.verify import fault_of, read_back
from deploy.writers import EXTRA, write_files
from harness.reports.report import machine
from harness.reports.settings import settings
from harness.reports.tables import words
from harness.runs import environment
from harness.runs.files import atomic_folder
from harness.runs.nets import write_spec
from harness.runs.session import Session
from harness.studies import study

BATCH = 256


class Study(study.Study[Mapping[str, Any]]):
    """Exports and measures formats of a net; rows are named by `format`."""

    key = "format"

    def __init__(self, run: Session, latency: Latency) -> None:
        super().__init__(run, threads=latency.used)
        self.latency = latency
        self.header["data"] = {"name": run.data.name, **run.used}
        self.header["fingerprint"] = run.samples["fingerprint"]
        self.header["versions"] = environment.versions(*INT8_EXTRA[1:], *EXTRA[1:])

    def run(
        self, saved: NetDescription, images: Tensor, labels: Tensor, make: Callable[[], Mapping[str, nn.Module]]
    ) -> None:
        """Export, check and measure, unless that is done; print and save the report.

        `saved` rebuilds the float net. Images are those of the test set, normalised, float32 (N, C, H, W), with labels
        (N,). `make` makes the net of each format, in eval mode on the CPU; all take these images and give logits.
        """
        self.saved, self.images, self.labels = saved, images, labels
        done = [row.latency_ms and self._has_files(row) for row in (FormatRow(**facts) for facts in self.rows.values())]
        if len(done) < len(FORMATS) or not all(done):
            self._measure(make())
        self.header["failed"] = self.failed
        rows = [FormatRow(**facts) for facts in self.rows.values()]
        notes = [note for row in rows for note in differences(row, len(labels))]
        notes += [f"{file} is left out: {fault}" for file, fault in self.failed.items()]
        settings_line = "; ".join(settings(self.header["config"], self.header["free"]))
        head = {"Data": words(self.header["data"]), **machine(self.header), "Settings": settings_line}
        self.finish(report(head, [FormatRow(**facts) for facts in self.write(FORMATS)], notes))

    def _has_files(self, row: FormatRow) -> bool:
        """Return whether all files of a format were written and are there."""
        written = len(row.files) == len(FORMATS[row.format])
        return written and all((self.out / file).exists() for file in row.files)

    def _measure(self, nets: Mapping[str, nn.Module]) -> None:
        logits = {name: logits_of(net, self.images) for name, net in nets.items()}
        with ExitStack() as stack:
            folders = {name: stack.enter_context(atomic_folder(self.out / name)) for name in nets}
            written = [path for name, net in nets.items() for path in self._export(name, net, folders[name])]
            good = self._compare(written, {folder: name for name, folder in folders.items()}, logits)
        self._remove_others(good)
        times = self.latency.measure(nets, self.images, lambda error, name: self.fail(error, f"{name}/latency"))
        for name in nets:
            files = {path: difference for path, difference in good.items() if path.parent.name == name}
            self.rows[name] = asdict(self._row(name, logits, files, times[name]))

    def _compare(
        self, files: Sequence[Path], names: Mapping[Path, str], logits: Mapping[str, Tensor]
    ) -> dict[Path, Difference]:
        """Compare the logits of files in folders of these names; those that are good, by their place in the run."""
        good: dict[Path, Difference] = {}
        for path, answer in read_back(files, self.images).items():
            name = names[path.parent]
            fault = fault_of(logits[name], answer, exact=name == "float32")
            if fault or isinstance(answer, str):
                self.failed[f"{name}/{path.name}"] = fault
                path.unlink()
            else:
                good[self.out / name / path.name] = compare(logits[name], answer)
        return good

    def _remove_others(self, good: Collection[Path]) -> None:
        """Remove an earlier call's files that this one has not written."""
        for path in (self.out / name / file.name for name, files in FORMATS.items() for file in files):
            if path not in good:
                path.unlink(missing_ok=True)

    def _export(self, name: str, net: nn.Module, folder: Path) -> list[Path]:
        """Write a format's files, each for itself; those that could be written."""
        if WEIGHTS in FORMATS[name]:
            write_spec(self.saved.spec, folder, self.saved.facts)
        errors = write_files(FORMATS[name], net, self.images, folder, self.saved.facts, place=name)
        for file, error in errors.items():
            self.fail(error, f"{name}/{file.name}")
        return [folder / file.name for file in FORMATS[name] if file not in errors]

    def _row(
        self, name: str, logits: Mapping[str, Tensor], files: Mapping[Path, Difference], times: Times
    ) -> FormatRow:
        correct = int((logits[name].argmax(1) == self.labels).sum())
        sized = self.out / name / FORMATS[name][-1].name
        largest = max(times, key=int, default="")
        return FormatRow(
            format=name,
            test_acc=correct / len(self.labels),
            test_correct=correct,
            bytes=sized.stat().st_size if sized in files else None,
            latency_ms=times,
            images_per_second=int(largest) / times[largest]["median"] * 1e3 if largest else None,
            max_logit_difference=float((logits[name] - logits["float32"]).abs().max()),
            files=[str(path.relative_to(self.out)) for path in files],
            file_differences={path.name: asdict(difference) for path, difference in files.items()},
        )


@torch.no_grad()
def logits_of(net: nn.Module, images: Tensor) -> Tensor:
    """Return logits (N, classes) of images (N, C, H, W)."""
    return torch.cat([net(batch) for batch in images.split(BATCH)])
