"""The bake-off's speed and memory beside the PyTorch distillation tutorial's plain loops, on the same images.

    python benchmarks/kd_speed.py                     # 5,000 images, 10 epochs: some minutes on 2 cores
    python benchmarks/kd_speed.py --out FILE --repeat 3 --threads 2 --wait-policy passive

Theirs: a data set of PIL images with ToTensor and Normalize, a DataLoader with two workers, and one loop a net. Ours:
`experiments/kd.py` itself, with its defaults. Both train DeepNN, then LightNN in the variants ce, kd, cosine and hint,
with Adam 1e-3, batches of 128 and seed 42, in float32. Each side runs in a process of its own, one after the other.

What is timed is training: of theirs the loops, of ours `Trainer.fit` from call to return, so that storing the teacher's
outputs, TensorBoard's files and checkpoints count; imports, the decoding of JPEG files and tests do not.
"""

import argparse
import contextlib
import functools
import json
import os
import resource
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from statistics import median
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Trainer
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms

from harness.runs import environment
from lit_modules.distillation import Distillation
from lit_modules.nets import DeepNN, LightNN

ARCHIVE = Path(__file__).resolve().parents[2] / "shared" / "data" / "cifar10-jpg.tar.xz"
VARIANTS = ("ce", "kd", "cosine", "hint")
SIDES = ("tutorial", "ours")
STUDENTS, TEACHER = 1 / 8, 1.0  # the most of the tutorial's time that ours may take
Figures = dict[str, float]


# The tutorial's side


class Pictures(Dataset):
    """Pixels in one array; each becomes a PIL image and is transformed when asked for, as in torchvision's CIFAR10."""

    def __init__(self, folder: Path) -> None:
        classes = sorted(folder.iterdir())
        files = [(path, label) for label, name in enumerate(classes) for path in sorted(name.iterdir())]
        self.pixels = np.stack([np.asarray(Image.open(path).convert("RGB")) for path, _ in files])
        self.labels = [label for _, label in files]
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


def cross_entropy(net: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """For the teacher, and for the student on its own."""
    return F.cross_entropy(net(images), labels)


def soft_targets(student: nn.Module, images: Tensor, labels: Tensor, teacher: nn.Module) -> Tensor:
    """Both distributions softened with temperature 2."""
    with torch.no_grad():
        wanted = F.softmax(teacher(images) / 2, 1)
    logits = student(images)
    divergence = (wanted * (wanted.log() - F.log_softmax(logits / 2, 1))).sum() / len(images)
    return 0.25 * 2**2 * divergence + 0.75 * F.cross_entropy(logits, labels)


def cosine(student: nn.Module, images: Tensor, labels: Tensor, teacher: nn.Module) -> Tensor:
    """Flattened feature maps, the teacher's 2048 values pooled to the student's 1024."""
    with torch.no_grad():
        wanted = F.avg_pool1d(torch.flatten(parts(teacher, images)[0], 1), 2)
    maps, logits = parts(student, images)
    angle = F.cosine_embedding_loss(torch.flatten(maps, 1), wanted, torch.ones(len(images)))
    return 0.25 * angle + 0.75 * F.cross_entropy(logits, labels)


def hint(student: nn.Module, images: Tensor, labels: Tensor, teacher: nn.Module) -> Tensor:
    """Feature maps, the student's through a convolution that is trained along."""
    with torch.no_grad():
        wanted, _ = parts(teacher, images)
    maps, logits = parts(student, images)
    distance = F.mse_loss(student.regressor(maps), wanted)  # type: ignore[operator]
    return 0.25 * distance + 0.75 * F.cross_entropy(logits, labels)


def train(net: nn.Module, loss_of: Callable[..., Tensor], loader: DataLoader, epochs: int, label: str) -> float:
    """The plain loop; seconds that it took."""
    start = time.perf_counter()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.001)
    net.train()
    for epoch in range(epochs):
        running_loss = 0.0
        for images, labels in loader:
            optimizer.zero_grad()
            loss = loss_of(net, images, labels)
            loss.backward()
            optimizer.step()
            running_loss += loss.item()
        print(f"tutorial {label:8}  epoch {epoch + 1}/{epochs}  loss {running_loss / len(loader):.4f}", flush=True)
    return time.perf_counter() - start


def tutorial(folder: Path, epochs: int) -> Figures:
    """The teacher's loop, then one for each student."""
    loader = DataLoader(Pictures(folder / "train"), batch_size=128, shuffle=True, num_workers=2)
    torch.manual_seed(42)
    teacher = DeepNN()
    seconds = {"teacher": train(teacher, cross_entropy, loader, epochs, "teacher")}
    teacher.eval()
    distilled = {"kd": soft_targets, "cosine": cosine, "hint": hint}
    for name in VARIANTS:
        torch.manual_seed(42)
        student = LightNN()
        if name == "hint":
            student.regressor = nn.Conv2d(16, 32, 3, padding=1)
        loss_of = functools.partial(distilled[name], teacher=teacher) if name in distilled else cross_entropy
        seconds[name] = train(student, loss_of, loader, epochs, name)
    return {**seconds, "students": sum(seconds[name] for name in VARIANTS), "peak_mib": peak_mib()}


# Our side


def ours(folder: Path, epochs: int) -> Figures:
    """The command, with a clock on its two fits and on the storing of the teacher's outputs within the second."""
    from experiments import kd  # not above: it sets OMP_WAIT_POLICY, which is not the tutorial's

    fits, storing = clocked(Trainer, "fit"), clocked(Distillation, "on_train_start")
    with tempfile.TemporaryDirectory() as out:
        kd.main([
            "--data", "ImageFolder", "--data.root", str(folder), "--data.validation_size", "0", "--seeds", "[42]",
            "--trainer.max_epochs", str(epochs), "--out", out,
        ])  # fmt: skip
    (teacher, _), (students, peak), (stored, _) = *fits, *storing
    return {"teacher": teacher, "students": students, "storing": stored, "peak_mib": peak}


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
    """The most memory that this process has held so far, without a loader's workers, which share most of theirs."""
    unit = 2**20 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


@contextlib.contextmanager
def chosen_images(data: Path, count: int) -> Iterator[Path]:
    """A folder of `count` training images, the first of each class, and some of them again for `kd.py` to test on."""
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        source = data
        if data.is_file():
            with tarfile.open(data) as archive:
                archive.extractall(root, filter=functools.partial(_training, below=count))
            source = next(root.iterdir())
        classes = sorted(path for path in (source / "train").iterdir() if path.is_dir())
        for i, name in enumerate(classes):
            share = count // len(classes) + (i < count % len(classes))
            chosen = sorted(name.glob("*.jpg"))[:share]
            if len(chosen) < share or not chosen:
                raise SystemExit(f"--images {count}: {name} has {len(chosen)} .jpg files, expected {max(share, 1)}")
            for part, paths in (("train", chosen), ("test", chosen[:10])):
                (root / "chosen" / part / name.name).mkdir(parents=True)
                for path in paths:
                    (root / "chosen" / part / name.name / path.name).symlink_to(path.resolve())
        yield root / "chosen"


def _training(member: tarfile.TarInfo, path: str, below: int) -> tarfile.TarInfo | None:
    """Of the archive's training images those with a number below `below`."""
    name = PurePosixPath(member.name)
    wanted = member.isfile() and name.parts[1] == "train" and int(name.stem) < below
    return tarfile.data_filter(member, path) if wanted else None


def environments(threads: int | None, wait_policy: str) -> dict[str, dict[str, str]]:
    """The environment of each side: equal, but that `kd.py` lets waiting threads sleep whatever the rival's do."""
    common = os.environ | ({} if threads is None else {"OMP_NUM_THREADS": str(threads)})
    passive = common | {"OMP_WAIT_POLICY": "PASSIVE"}
    return {
        "tutorial": passive if wait_policy == "passive" else common,
        "ours": {"OMP_WAIT_POLICY": "PASSIVE"} | common,
    }


def in_a_process(side: str, folder: Path, epochs: int, env: dict[str, str]) -> dict[str, Any]:
    """What a side measures, in a fresh process with this environment; what it prints goes to stderr."""
    with tempfile.NamedTemporaryFile("r") as answer:
        command = [sys.executable, __file__, "--side", side, "--data", str(folder), "--epochs", str(epochs)]
        subprocess.run([*command, "--out", answer.name], env=env, stdout=sys.stderr, check=True)
        return json.load(answer)


def summary(runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Medians of each side's figures, all figures behind them, and what ours take of the tutorial's."""
    medians = {s: {k: median(run[k] for run in runs[s]) for k in runs[s][0]} for s in SIDES}
    for side in SIDES:
        medians[side]["total"] = medians[side]["teacher"] + medians[side]["students"]
    ratios = {k: medians["ours"][k] / medians["tutorial"][k] for k in ("teacher", "students", "total", "peak_mib")}
    return {**medians, "ratios": ratios, "runs": runs}


def table(found: dict[str, Any]) -> str:
    """The phases, a line each."""
    targets = {"teacher": f"at most {TEACHER:g}", "students": f"at most {STUDENTS:g} (1/{1 / STUDENTS:g})"}
    names = {
        "teacher": "teacher, s", **{name: f"student {name}, s" for name in VARIANTS}, "students": "all students, s",
        "storing": "  of it storing outputs, s", "total": "teacher and students, s", "peak_mib": "peak memory, MiB",
    }  # fmt: skip
    lines = [f"{'':27}{'tutorial':>10}{'ours':>10}  ours/tutorial"]
    for key, name in names.items():
        figures = [f"{found[side][key]:10.1f}" if key in found[side] else " " * 10 for side in SIDES]
        ratio = found["ratios"].get(key)
        shown = f"  {ratio:.3f} = 1/{1 / ratio:.1f}" if ratio else ""
        target = f"   target: {targets[key]}" if key in targets else ""
        lines.append(f"{name:27}{''.join(figures)}{shown}{target}".rstrip())
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure both sides, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--data", type=Path, default=ARCHIVE, help="the archive, or a folder with train/<class>/*.jpg")
    parser.add_argument("--images", type=int, default=5000, help="so many, the classes in balance")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--threads", type=int, help="OMP_NUM_THREADS of both sides; torch's own number when not given")
    parser.add_argument(
        "--wait-policy", choices=("default", "passive"), default="default",
        help="of the tutorial's waiting OpenMP threads: the machine's default, or PASSIVE as kd.py sets it for itself",
    )  # fmt: skip
    parser.add_argument("--repeat", type=int, default=1, help="runs of each side, in turn; medians are shown")
    parser.add_argument("--out", type=Path, help="write all figures to this file, as JSON")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)  # in the sub-process
    args = parser.parse_args(argv)
    if args.side:
        measured = {"tutorial": tutorial, "ours": ours}[args.side](args.data, args.epochs)
        args.out.write_text(json.dumps(measured | {"threads": torch.get_num_threads()}))
        return
    envs = environments(args.threads, args.wait_policy)
    runs: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    with chosen_images(args.data, args.images) as folder:
        for _ in range(args.repeat):
            for side in SIDES:
                runs[side].append(in_a_process(side, folder, args.epochs, envs[side]))
    settings = {key: getattr(args, key) for key in ("images", "epochs", "repeat")}
    settings["wait_policy"] = {side: envs[side].get("OMP_WAIT_POLICY", "the machine's default") for side in SIDES}
    found = summary(runs)
    settings["threads"] = {side: int(found[side].pop("threads")) for side in SIDES}
    header = {**settings, "hardware": environment.hardware(), "versions": environment.versions()}
    print(*(f"{key}: {value}" for key, value in header.items()), table(found), sep="\n")
    if args.out:
        args.out.write_text(json.dumps({"benchmark": "kd_speed", **header, **found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
