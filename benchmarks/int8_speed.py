"""Throughput and file sizes of int8 against float32, for a CIFAR ResNet.

    python benchmarks/int8_speed.py --depth 20 --batch_size 128 --threads 1 --out int8_speed.json

Both nets are compiled by Inductor with frozen weights and called in turn (`deploy.latency`); a compiled
net that answers otherwise is an error. Weights are random, as no time depends on them, and int8 is post-training.
Expected on a processor with VNNI: at least 2 times the throughput; elsewhere there is no bound. The int8 ONNX file is
expected to have at most 0.3 of the bytes. Ends with exit code 1 where it is not so. Run it on a quiet machine.
"""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from apprentice.keyed import with_seed
from benchmarks import common
from benchmarks.common import Measurement, Runs, Target
from deploy.export_folder import ONNX
from deploy.int8 import quantize_post_training
from deploy.latency import Latency
from deploy.writers import write_onnx
from lit_modules.nets import ResNet

SHAPE = (3, 32, 32)
INFO = Path("/proc/cpuinfo")
VNNI = INFO.exists() and "vnni" in INFO.read_text()  # whether the processor has instructions for int8 products
TARGETS = {
    "speed": Target("int8 over float32, images/s", low=2.0 if VNNI else 0.0),
    "size": Target("int8 over float32, bytes of the ONNX file", high=0.3),
}


def build_both(depth: int, batch_size: int) -> tuple[dict[str, nn.Module], Tensor]:
    """Build the net in float32 and int8, and images (batch_size, 3, 32, 32) of noise."""
    net = with_seed(0, lambda: ResNet(depth, SHAPE)).eval()
    images = torch.randn(batch_size, *SHAPE, generator=torch.Generator().manual_seed(0))
    return {"float32": net, "int8": quantize_post_training(net, [images])}, images


def onnx_bytes(net: nn.Module, images: Tensor) -> int:
    with tempfile.TemporaryDirectory() as folder:
        write_onnx(net, images, Path(folder))
        return (Path(folder) / ONNX.name).stat().st_size


def measure(args: argparse.Namespace) -> Measurement:
    nets, images = build_both(args.depth, args.batch_size)
    latency = Latency(args.threads, [args.batch_size], args.rounds).measure(nets, images)
    times = {name: by_size[str(args.batch_size)] for name, by_size in latency.items()}
    speeds: Runs = {name: [args.batch_size / time["median"] * 1e3] for name, time in times.items()}
    sizes: Runs = {name: [onnx_bytes(net, images)] for name, net in nets.items()}
    ratios = {key: common.over(runs["int8"], runs["float32"]) for key, runs in (("speed", speeds), ("size", sizes))}
    return Measurement({"images/s": speeds, "bytes": sizes}, ratios, {"vnni": VNNI, "latency_ms": times})


def main(argv: Sequence[str] | None = None) -> None:
    command = common.parser(__doc__, ("--repeats", 30), "calls of each net")
    command.set_defaults(out=Path("int8_speed.json"))
    command.add_argument("--depth", type=int, default=20)
    command.add_argument("--batch_size", type=int, default=128)
    command.add_argument("--threads", type=int, default=1)
    common.run(command.parse_args(argv), measure, TARGETS, strict=True)


if __name__ == "__main__":
    main()
