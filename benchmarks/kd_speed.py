"""The bake-off's speed and memory beside the PyTorch distillation tutorial's plain loops, on the same images.

    python benchmarks/kd_speed.py                     # 5,000 images, 10 epochs: some minutes on 2 cores
    python benchmarks/kd_speed.py --out FILE --repeat 3 --threads 2 --wait-policy passive

Theirs: a data set of PIL images with ToTensor and Normalize, a DataLoader with two workers, and one loop a net. Ours:
`experiments/kd.py` itself, with its defaults. Both train DeepNN, then LightNN in the variants ce, kd, cosine and hint,
with Adam 1e-3, batches of 128 and seed 42, in float32. Each side runs in processes of its own, in turn.

Training is timed: theirs is the loops; ours is `Trainer.fit` from call to return, which includes storing the teacher's
outputs, TensorBoard's files and checkpoints. Imports, decoding JPEG files and tests are left out.
"""

import argparse
import functools
import resource
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms

from benchmarks import common
from benchmarks.common import Found, Runs, Target
from datamodules import ImageFolder
from lit_modules.distillation import Distillation
from lit_modules.nets import DeepNN, LightNN

ARCHIVE = common.DATA / "cifar10-jpg.tar.xz"
VARIANTS = ("ce", "kd", "cosine", "hint")
SIDES = ("tutorial", "ours")
NAMES = {
    "teacher": "teacher", **{name: f"student {name}" for name in VARIANTS}, "students": "all students",
    "storing": "of it storing outputs", "total": "teacher and students", "peak_mib": "peak memory",
}  # fmt: skip
TARGETS = {
    "teacher": Target("teacher, ours over the tutorial's", high=1.0),
    "students": Target("all students, ours over the tutorial's", high=1 / 8),
    "total": Target("teacher and students, ours over the tutorial's"),
    "peak_mib": Target("peak memory, ours over the tutorial's"),
}
Figures = dict[str, float]


# The tutorial's side


class Pictures(Dataset):
    """Pixels in one array; each becomes a PIL image and is transformed when asked for, as in torchvision's CIFAR10."""

    def __init__(self, folder: str, count: int) -> None:
        images, labels = (
            ImageFolder(folder, train_size=count, validation_size=0).split("train").take(torch.arange(count))
        )
        self.pixels, self.labels = images.permute(0, 2, 3, 1).numpy(), labels.tolist()
        mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
        self.transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize(mean, std)])

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, place: int) -> tuple[Tensor, int]:
        return self.transform(Image.fromarray(self.pixels[place])), self.labels[place]


def parts(net: nn.Module, images: Tensor) -> tuple[Tensor, Tensor]:
    """Feature maps and logits."""
    maps = net.features(images)  # type: ignore[operator]
    return maps, net.classifier(torch.flatten(maps, 1))  # type: ignore[operator]


def loss_of(name: str, student: nn.Module, teacher: nn.Module | None, images: Tensor, labels: Tensor) -> Tensor:
    """The tutorial's loss of a variant; without a teacher, cross-entropy."""
    if teacher is None:
        return F.cross_entropy(student(images), labels)
    with torch.no_grad():
        teachers_maps, teachers_logits = parts(teacher, images)
    maps, logits = parts(student, images)
    loss = 0.75 * F.cross_entropy(logits, labels)
    if name == "kd":  # both distributions softened with temperature 2
        wanted = F.softmax(teachers_logits / 2, 1)
        divergence = (wanted * (wanted.log() - F.log_softmax(logits / 2, 1))).sum() / len(images)
        return loss + 0.25 * 2**2 * divergence
    if name == "cosine":  # flattened maps; the teacher's 2048 values are pooled to the student's 1024
        wanted = F.avg_pool1d(torch.flatten(teachers_maps, 1), 2)
        return loss + 0.25 * F.cosine_embedding_loss(torch.flatten(maps, 1), wanted, torch.ones(len(images)))
    # hint: the student's maps go through a convolution that is trained with it
    return loss + 0.25 * F.mse_loss(student.regressor(maps), teachers_maps)  # type: ignore[operator]


def train(name: str, net: nn.Module, teacher: nn.Module | None, loader: DataLoader, epochs: int) -> float:
    """The plain loop; returns its seconds."""
    start = time.perf_counter()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.001)
    net.train()
    for epoch in range(epochs):
        running_loss = 0.0
        for images, labels in loader:
            optimizer.zero_grad()
            loss = loss_of(name, net, teacher, images, labels)
            loss.backward()
            optimizer.step()
            running_loss += loss.item()
        print(f"tutorial {name:8}  epoch {epoch + 1}/{epochs}  loss {running_loss / len(loader):.4f}", flush=True)
    return time.perf_counter() - start


def tutorial(folder: str, count: int, epochs: int) -> Figures:
    """The teacher's loop, then one for each student."""
    loader = DataLoader(Pictures(folder, count), batch_size=128, shuffle=True, num_workers=2)
    torch.manual_seed(42)
    teacher = DeepNN()
    seconds = {"teacher": train("teacher", teacher, None, loader, epochs)}
    teacher.eval()
    for name in VARIANTS:
        torch.manual_seed(42)
        student = LightNN()
        if name == "hint":
            student.regressor = nn.Conv2d(16, 32, 3, padding=1)
        seconds[name] = train(name, student, None if name == "ce" else teacher, loader, epochs)
    students = sum(seconds[name] for name in VARIANTS)
    return {**seconds, "students": students, "peak_mib": peak_mib(), "threads": torch.get_num_threads()}


# Our side


def ours(folder: str, count: int, epochs: int) -> Figures:
    """The command, with a clock on its two fits and on storing the teacher's outputs in the second."""
    from experiments import kd  # not above: it sets OMP_WAIT_POLICY, which is not the tutorial's

    fits, storing = clocked(Trainer, "fit"), clocked(Distillation, "on_train_start")
    with tempfile.TemporaryDirectory() as out:
        length = ["--seeds", "[42]", "--trainer.max_epochs", str(epochs)]
        kd.main([*image_flags(folder, count), *length, "--out", out])
    (teacher, _), (students, peak), (stored, _) = *fits, *storing
    threads = torch.get_num_threads()
    return {"teacher": teacher, "students": students, "storing": stored, "peak_mib": peak, "threads": threads}


def clocked(owner: type, method: str) -> list[tuple[float, float]]:
    """Seconds of each call of a method from now on, and the peak memory after it."""
    calls, call = [], getattr(owner, method)

    @functools.wraps(call)
    def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        result = call(*args, **kwargs)
        calls.append((time.perf_counter() - start, peak_mib()))
        return result

    setattr(owner, method, timed)
    return calls


# Both


def peak_mib() -> float:
    """The peak memory of this process, without a loader's workers, which share most of theirs."""
    unit = 2**20 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


@contextmanager
def unpacked(data: Path) -> Iterator[str]:
    """The folder itself, or that of an archive's images."""
    with tempfile.TemporaryDirectory() as temporary:
        if data.is_file():
            with tarfile.open(data) as archive:
                archive.extractall(temporary, filter="data")
            data = next(Path(temporary).iterdir())
        yield str(data)


def image_flags(folder: str, count: int) -> list[str]:
    """The options of `kd.py` that train on so many of a folder's images, the classes in balance."""
    sizes = ["--data.train_size", str(count), "--data.test_size", str(count // 10), "--data.validation_size", "0"]
    return ["--data", "ImageFolder", "--data.root", folder, *sizes]


def environments(args: argparse.Namespace) -> dict[str, dict[str, str]]:
    """The environment of each side: equal, except that `kd.py` lets waiting threads sleep whatever the rival's do."""
    usual = common.threads(args.threads)
    passive = usual | {"OMP_WAIT_POLICY": "PASSIVE"}
    theirs = passive if args.wait_policy == "passive" else usual
    return {"tutorial": theirs, "ours": {"OMP_WAIT_POLICY": "PASSIVE"} | usual}


def measure(args: argparse.Namespace) -> Found:
    """Both sides in turn, and what ours take of the tutorial's."""
    envs, sides = environments(args), {"tutorial": tutorial, "ours": ours}
    with unpacked(args.data) as folder:
        sizes = folder, args.images, args.epochs
        rivals = {side: functools.partial(common.called, sides[side], *sizes, env=envs[side]) for side in SIDES}
        runs = common.take_turns(rivals, args.rounds)
    threads = {side: int(runs[side][0]["threads"]) for side in SIDES}
    policies = {side: envs[side].get("OMP_WAIT_POLICY", "the machine's default") for side in SIDES}
    for each in (figures for side in SIDES for figures in runs[side]):
        each["total"] = each["teacher"] + each["students"]
    values = {key: {side: [figures.get(key, 0.0) for figures in runs[side]] for side in SIDES} for key in NAMES}
    named: dict[str, Runs] = {"s": {}, "MiB": {}}
    for key, name in NAMES.items():
        for side in SIDES:
            if key in runs[side][0]:
                named["MiB" if key == "peak_mib" else "s"][f"{side}, {name}"] = values[key][side]
    ratios = {key: common.over(values[key]["ours"], values[key]["tutorial"]) for key in TARGETS}
    return Found(named, ratios, {"threads": threads, "wait_policy": policies})


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, write."""
    command = common.parser(__doc__, ("--repeat", 1), "runs of each side, in turn")
    command.add_argument("--data", type=Path, default=ARCHIVE, help="images as ImageFolder takes them, or an archive")
    command.add_argument("--images", type=int, default=5000, help="so many, the classes in balance")
    command.add_argument("--epochs", type=int, default=10)
    command.add_argument("--threads", type=int, help="OMP_NUM_THREADS of both sides; torch's own number when not given")
    command.add_argument(
        "--wait-policy", choices=("default", "passive"), default="default",
        help="of the tutorial's waiting OpenMP threads: the machine's default, or PASSIVE as kd.py sets it for itself",
    )  # fmt: skip
    common.run(command.parse_args(argv), measure, TARGETS)


if __name__ == "__main__":
    main()
