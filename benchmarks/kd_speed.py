"""The bake-off's speed and memory beside the PyTorch distillation tutorial's plain loops, on the same images.

    python benchmarks/kd_speed.py                     # 5,000 images, 10 epochs: some minutes on 2 cores
    python benchmarks/kd_speed.py --out FILE --repeat 3 --threads 2 --wait-policy passive

Theirs: a data set of PIL images with ToTensor and Normalize, a DataLoader with two workers, and one loop a net. Ours:
`experiments/kd.py` itself, with its defaults. Both train DeepNN, then LightNN in the variants ce, kd, cosine and hint,
with Adam 1e-3, batches of 128 and seed 42, in float32. Each side runs in processes of its own, in turn.

Training is timed: theirs is the loops; ours is Lightning's fits from their start to their end, which includes storing
the teacher's outputs, TensorBoard's files and checkpoints. Imports, decoding JPEG files and tests are left out. Of the
tutorial's nets it prints the test accuracies; a run of kd.py has those of ours.
"""

import argparse
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms

from apprentice.errors import BadInput
from benchmarks import common
from benchmarks.common import Measurement, Target
from datamodules import ImageFolder
from harness.runs.progress import peak_memory
from lit_modules.nets import DeepNN, LightNN

ARCHIVE = common.DATA / "cifar10-jpg.tar.xz"
STUDENTS = ("student ce", "student kd", "student cosine", "student hint")
TARGETS = {
    "teacher": Target("teacher, ours over the tutorial's", high=1.0),
    "students": Target("all students, ours over the tutorial's", high=1 / 8),
    "total": Target("teacher and students, ours over the tutorial's"),
    "peak_mib": Target("peak memory, ours over the tutorial's"),
}
Figures = dict[str, float]


class Pictures(Dataset):
    """The tutorial's data set: pixels in one array; each item is a transformed PIL image, as torchvision's CIFAR10."""

    def __init__(self, folder: str, count: int, part: str = "train") -> None:
        sizes: dict[str, Any] = {f"{part}_size": count}
        data = ImageFolder(folder, validation_size=0, **sizes)
        images, labels = data.split(part).take(torch.arange(count))
        self.pixels, self.labels = images.permute(0, 2, 3, 1).contiguous().numpy(), labels.tolist()
        normalize = transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
        self.transform = transforms.Compose([transforms.ToTensor(), normalize])

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, place: int) -> tuple[Tensor, int]:
        return self.transform(Image.fromarray(self.pixels[place])), self.labels[place]


def loss_of(name: str, student: Any, teacher: Any, images: Tensor, labels: Tensor) -> Tensor:
    """Compute the tutorial's loss of a variant; without a teacher, cross-entropy."""
    if teacher is None:
        return F.cross_entropy(student(images), labels)
    with torch.no_grad():
        teachers_maps = teacher.features(images)
        teachers_logits = teacher.classifier(torch.flatten(teachers_maps, 1))
    maps = student.features(images)
    logits = student.classifier(torch.flatten(maps, 1))
    loss = 0.75 * F.cross_entropy(logits, labels)
    if name == "student kd":  # as later code of the tutorial; its first code keeps the teacher's entropy, a constant
        divergence = F.kl_div(F.log_softmax(logits / 2, 1), F.softmax(teachers_logits / 2, 1), reduction="batchmean")
        return loss + 0.25 * 2**2 * divergence
    if name == "student cosine":  # flattened maps; the teacher's 2048 values are pooled to the student's 1024
        target = F.avg_pool1d(torch.flatten(teachers_maps, 1), 2)
        return loss + 0.25 * F.cosine_embedding_loss(torch.flatten(maps, 1), target, images.new_ones(len(images)))
    # hint: the student's maps go through a convolution that is trained with it
    return loss + 0.25 * F.mse_loss(student.regressor(maps), teachers_maps)


def train(
    name: str, net: nn.Module, teacher: nn.Module | None, loader: DataLoader | Sequence[Any], epochs: int
) -> None:
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
        print(f"{name:14}  epoch {epoch + 1}/{epochs}  loss {running_loss / len(loader):.4f}", flush=True)


def loops(
    loader: DataLoader | Sequence[Any], epochs: int, device: torch.device = common.CPU
) -> tuple[Figures, dict[str, nn.Module]]:
    """Run the teacher's loop and each student's on batches on the device; return their seconds and the nets."""
    figures: Figures = {}
    nets: dict[str, nn.Module] = {}
    teacher: nn.Module | None = None
    for name in ("teacher", *STUDENTS):
        torch.manual_seed(42)
        net: DeepNN | LightNN = DeepNN() if teacher is None else LightNN()
        if name == "student hint":
            net.regressor = nn.Conv2d(16, 32, 3, padding=1)
        net.to(device)
        guide = None if name == "student ce" else teacher
        figures[name] = common.seconds(partial(train, name, net, guide, loader, epochs))
        nets[name] = net.eval()
        teacher = teacher or net
    return figures | {"all students": sum(figures[name] for name in STUDENTS)}, nets


@torch.no_grad()
def accuracy(net: nn.Module, loader: DataLoader) -> float:
    correct = [(net(images).argmax(1) == labels).float() for images, labels in loader]
    return 100 * torch.cat(correct).mean().item()


def tutorial(folder: str, count: int, epochs: int) -> dict[str, Any]:
    """Run the loops on the tutorial's loader; return their figures and the nets' accuracies."""
    workers: Any = {"num_workers": 2, "multiprocessing_context": "fork"}
    loader = DataLoader(Pictures(folder, count), batch_size=128, shuffle=True, **workers)
    figures, nets = loops(loader, epochs)
    figures |= {"peak memory": peak_memory(common.CPU), "threads": torch.get_num_threads()}
    test = DataLoader(Pictures(folder, count // 10, "test"), batch_size=128, **workers)
    return {**figures, "accuracies": {name: round(accuracy(net, test), 2) for name, net in nets.items()}}


def bake_off(folder: str, count: int, epochs: int, *flags: str, env: Mapping[str, str] | None = None) -> list[Any]:
    """Run `kd.py` on so many of a folder's images, classes balanced; return rank zero's records of its two fits."""
    sizes = ["--data.train_size", str(count), "--data.test_size", str(count // 10), "--data.validation_size", "0"]
    data = ["--data", "ImageFolder", "--data.root", folder, *sizes, "--trainer.max_epochs", str(epochs)]
    clocks = common.run_clocked("kd", *data, *flags, env=env)
    return [clocks["LitClassifier0"], clocks["Distillation0"]]


def ours(folder: str, count: int, epochs: int, env: Mapping[str, str]) -> Figures:
    """Run the command; it stores the teacher's outputs before the first step of its second fit."""
    teacher, students = bake_off(folder, count, epochs, "--seeds", "[42]", env=env)
    figures = {"teacher": teacher["fit"], "all students": students["fit"], "of it storing outputs": students["before"]}
    return {**figures, "peak memory": students["peak_mib"], "threads": students["threads"]}


@contextmanager
def unpack(args: argparse.Namespace) -> Iterator[str]:
    """Yield the folder `--data`, an archive unpacked; BadInput if it has fewer training images than `--images`."""
    data = args.data
    with tempfile.TemporaryDirectory() as temporary:
        if data.is_file():
            with tarfile.open(data) as archive:
                archive.extractall(temporary, filter="data")
            data = next(Path(temporary).iterdir())
        count = len([*data.glob("train/*/*")])
        if args.images > count:
            raise BadInput("images", args.images, f"at most {count}, the training images in {args.data}")
        yield str(data)


def measure(args: argparse.Namespace) -> Measurement:
    variables, passive = common.thread_variables(args.threads), {"OMP_WAIT_POLICY": "PASSIVE"}
    envs = {"tutorial": variables | (passive if args.wait_policy == "passive" else {}), "ours": passive | variables}
    with unpack(args) as folder:
        sizes = folder, args.images, args.epochs
        sides: Any = {"tutorial": partial(common.call_fresh, tutorial), "ours": ours}
        rivals = {name: partial(side, *sizes, env=envs[name]) for name, side in sides.items()}
        runs: dict[str, list[dict[str, Any]]] = common.take_turns(rivals, args.rounds)
    threads = {side: int(rounds[0].pop("threads")) for side, rounds in runs.items()}
    accuracies = [figures.pop("accuracies") for figures in runs["tutorial"]]
    policies = {side: env.get("OMP_WAIT_POLICY", "the machine's default") for side, env in envs.items()}
    for figures in [*runs["tutorial"], *runs["ours"]]:
        figures["teacher and students"] = figures["teacher"] + figures["all students"]
    values = {f"{side}, {name}": [figures[name] for figures in runs[side]] for side in runs for name in runs[side][0]}
    names = {key: target.text.partition(",")[0] for key, target in TARGETS.items()}
    ratios = {key: common.over(values[f"ours, {name}"], values[f"tutorial, {name}"]) for key, name in names.items()}
    memory = {name: values.pop(name) for name in [*values] if name.endswith("memory")}
    facts = {"threads": threads, "wait_policy": policies, "accuracies": accuracies}
    return Measurement({"s": values, "MiB": memory}, ratios, facts)


def main(argv: Sequence[str] | None = None) -> None:
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
