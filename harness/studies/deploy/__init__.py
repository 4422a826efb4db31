"""The study of deployment: a student in each format, exported, answered for elsewhere, measured; and its report."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from harness.reports.figures import figure
from harness.reports.report import Part, Report, machine
from harness.reports.settings import settings
from harness.reports.tables import NONE, Table, count, short, table_of, words
from harness.runs import environment
from harness.runs.nets import Saved, write_spec
from harness.runs.quiet import notice
from harness.runs.session import Session
from harness.studies import study
from harness.studies.deploy import formats
from harness.studies.deploy.builder import Options
from harness.studies.deploy.latency import Latency, Times
from lit_modules.quantization import EXTRA

__all__ = ["Latency", "Options", "Study"]
FILES = {  # of each format; its size is that of the last
    "float32": (formats.PROGRAM, formats.WEIGHTS, formats.ONNX),
    "bfloat16": (formats.PROGRAM, formats.WEIGHTS),
    "int8-ptq": (formats.PROGRAM, formats.ONNX),
    "int8-qat": (formats.PROGRAM, formats.ONNX),
}
BATCH = 256
AREA = 1200  # points squared, of the largest file
COLUMNS = (
    "Size: of the ONNX file, for bfloat16 of the weights as safetensors. Latency: median (95th percentile) of calls of "
    "each net in turn, compiled by Inductor with frozen weights. Images/s: at the largest batch. Difference: to "
    "float32, the largest of a logit on the test set."
)


@dataclass(frozen=True)
class Row:
    """What is measured of a format."""

    format: str  # its name
    test_acc: float  # of the test set
    test_correct: int  # predictions
    bytes: int | None  # size of its file; None where it could not be written
    latency_ms: Times  # by batch size; nothing where it could not be compiled
    images_per_second: float | None  # at the largest batch
    max_logit_difference: float  # to float32, on the test set
    files: list[str]  # that were written and read again, in the run's folder
    # By file, how its answers differ from the net's; nothing of those of older versions.
    file_differences: dict[str, dict[str, float]] = field(default_factory=dict)


class Study(study.Study[Mapping[str, Any]]):
    """Exports and measures formats of a net; rows are named by `format`."""

    key = "format"

    def __init__(self, run: Session, latency: Latency) -> None:
        super().__init__(run, threads=latency.used)
        self.latency = latency
        self.header["data"] = {"name": run.data.name, **run.used}
        self.header["fingerprint"] = run.samples["fingerprint"]
        self.header["versions"] = environment.versions(*EXTRA[1:], *formats.EXTRA[1:])

    def run(self, saved: Saved, images: Tensor, labels: Tensor, make: Callable[[], Mapping[str, nn.Module]]) -> None:
        """Export, check and measure, unless that is done; print and save the report.

        `saved` rebuilds the float net. Images are those of the test set, normalised, float32 (N, C, H, W), with labels
        (N,). `make` makes the net of each format, in eval mode on the CPU; all take these images and give logits.
        """
        self.saved, self.images, self.labels = saved, images, labels
        done = [row.latency_ms and self._has_files(row) for row in (Row(**facts) for facts in self.rows.values())]
        if len(done) < len(FILES) or not all(done):
            self._measure(make())
        self.header["failed"] = self.failed
        rows = [Row(**facts) for facts in self.rows.values()]
        notes = [note for row in rows for note in differences(row, len(labels))]
        notes += [f"{file} is left out: {fault}" for file, fault in self.failed.items()]
        settings_line = "; ".join(settings(self.header["config"], self.header["free"]))
        head = {"Data": words(self.header["data"]), **machine(self.header), "Settings": settings_line}
        self.finish(report(head, [Row(**facts) for facts in self.write(FILES)], notes))

    def _has_files(self, row: Row) -> bool:
        """Return whether all files of a format were written and are there."""
        written = len(row.files) == len(FILES[row.format])
        return written and all((self.out / file).exists() for file in row.files)

    def _measure(self, nets: Mapping[str, nn.Module]) -> None:
        logits = {name: logits_of(net, self.images) for name, net in nets.items()}
        written = [path for name, net in nets.items() for path in self._export(name, net)]
        good: dict[Path, formats.Difference] = {}
        notice("reading each file again in a fresh process")
        for path, answer in formats.answers(written, self.images).items():
            name = path.parent.name
            if isinstance(answer, str):
                fault = answer
            elif name == "float32":
                fault = formats.disagreement(logits[name], answer, exact=True)
            else:  # a shorter type rounds, as far as its kernels go; how much is measured
                fault = "" if answer.isfinite().all() else formats.NOT_FINITE
            if fault:
                self.failed[f"{name}/{path.name}"] = fault
            else:
                assert not isinstance(answer, str)
                good[path] = formats.compare(logits[name], answer)
        times = self.latency.measure(nets, self.images, lambda error, name: self.fail(error, f"{name}/latency"))
        for name in nets:
            files = {path: difference for path, difference in good.items() if path.parent.name == name}
            self.rows[name] = asdict(self._row(name, logits, files, times[name]))

    def _export(self, name: str, net: nn.Module) -> list[Path]:
        """Write a format's files, each for itself; those that could be written."""
        folder, facts = self.out / name, self.saved.facts
        folder.mkdir(exist_ok=True)
        for file in FILES[name]:
            (folder / file).unlink(missing_ok=True)
            notice(f"writing {name}/{file}")
            try:
                if file == formats.PROGRAM:
                    formats.write_program(net, self.images, folder, facts)
                elif file == formats.ONNX:
                    formats.write_onnx(net, self.images, folder, facts)
                else:
                    write_spec(self.saved.spec, folder, facts)
                    formats.write_weights(net.net if isinstance(net, formats.Rounded) else net, folder, facts)
            except Exception as error:  # noqa: BLE001 - whatever an exporter makes of a net that it can't write
                self.fail(error, f"{name}/{file}")
        return [folder / file for file in FILES[name] if (folder / file).exists()]

    def _row(
        self, name: str, logits: Mapping[str, Tensor], files: Mapping[Path, formats.Difference], times: Times
    ) -> Row:
        correct = int((logits[name].argmax(1) == self.labels).sum())
        sized = self.out / name / FILES[name][-1]
        largest = max(times, key=int, default="")
        return Row(
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


def report(header: Mapping[str, str], rows: Sequence[Row], notes: Sequence[str]) -> Report:
    """Build the report from the rows and notes on what is left out."""
    text: list[Part] = [table(rows), COLUMNS, *notes]
    pngs = {"results.png": picture(rows)} if _batch_sizes(rows) else {}
    return Report(header, text, [*text, "![accuracy against latency](results.png)"], pngs)


def differences(row: Row, count: int) -> Iterator[str]:
    """Yield a note on each file of a format that answers otherwise than the net, on so many test images."""
    for file, facts in row.file_differences.items():
        if differ := facts["predictions"]:
            largest = f"its logits differ by up to {facts['max_logit_difference']:.2g}"
            yield f"{row.format}/{file}: {differ:,} of {count:,} predictions are others than the net's; {largest}."


def _batch_sizes(rows: Sequence[Row]) -> list[str]:
    """Return batch sizes with a latency."""
    return sorted({size for row in rows for size in row.latency_ms}, key=int)


def table(rows: Sequence[Row]) -> Table:
    """Return one line a format."""
    return table_of([
        ("format", [row.format for row in rows]),
        ("test accuracy, %", [f"{100 * row.test_acc:.2f}" for row in rows]),
        ("correct", [count(row.test_correct) for row in rows]),
        ("size, KiB", [NONE if row.bytes is None else f"{row.bytes / 2**10:,.1f}" for row in rows]),
        *((f"ms, batch {size}", [_latency(row, size) for row in rows]) for size in _batch_sizes(rows)),
        ("images/s", [short(row.images_per_second) for row in rows]),
        ("difference", [f"{row.max_logit_difference:.2g}" for row in rows]),
    ])  # fmt: skip


def _latency(row: Row, size: str) -> str:
    times = row.latency_ms.get(size)
    return f"{short(times['median'])} ({short(times['p95'])})" if times else NONE


def picture(rows: Sequence[Row]) -> bytes:
    """Draw a PNG: accuracy against the median latency of each batch size; areas are sizes on disk."""
    sizes = _batch_sizes(rows)
    placed = [(row, row.bytes) for row in rows if row.bytes is not None and row.latency_ms]
    largest = max((size for _, size in placed), default=1)
    with figure(5.5 * len(sizes), 4) as (drawn, png):
        for axes, size in zip(drawn.subplots(1, len(sizes), squeeze=False)[0], sizes, strict=True):
            for number, (row, file_size) in enumerate(placed):
                place, look = (row.latency_ms[size]["median"], 100 * row.test_acc), {"color": f"C{number}"}
                axes.scatter(*place, s=AREA * file_size / largest, alpha=0.5, linewidths=0, **look)
                axes.scatter(*place, s=8, label=f"{row.format}, {file_size / 2**10:,.0f} KiB", **look)
            axes.ticklabel_format(useOffset=False)
            axes.margins(0.25)
            axes.set_xlabel("median latency, ms")
            axes.set_ylabel("test accuracy, %")
            axes.set_title(f"batch {size}; areas are sizes")
            axes.legend(loc="best")
    return png.getvalue()
