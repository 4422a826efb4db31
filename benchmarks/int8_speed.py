"""Throughput and file sizes of int8 against float32, for a CIFAR ResNet.

    python benchmarks/int8_speed.py --depth 20 --batch_size 128 --threads 1 --out int8_speed.json

Both nets are compiled by Inductor with frozen weights and called in turn (`harness.studies.deploy.Latency`); one that
then answers otherwise is an error. Weights are random, which no time depends on, and int8 is post-training. Expected on
a processor with VNNI: at least 2 times the throughput; elsewhere the ratio is told without a bound. The int8 ONNX file
is expected to have at most 0.3 of the bytes. Ends with exit code 1 where it is not so. Run it on a quiet machine.
"""

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from apprentice.keyed import with_seed
from harness.runs.environment import setting
from harness.studies.deploy import Latency, formats
from lit_modules.nets import ResNet
from lit_modules.quantization import post_training

SHAPE = (3, 32, 32)
FASTER, SMALLER = 2.0, 0.3


def vnni() -> bool:
    """Whether the processor multiplies int8 by itself."""
    info = Path("/proc/cpuinfo")
    return info.exists() and "vnni" in info.read_text()


def both(depth: int, batch_size: int) -> tuple[dict[str, nn.Module], Tensor]:
    """The net in float32 and int8, and images (batch_size, 3, 32, 32) of noise."""
    net = with_seed(0, lambda: ResNet(depth, SHAPE)).eval()
    images = torch.randn(batch_size, *SHAPE, generator=torch.Generator().manual_seed(0))
    return {"float32": net, "int8": post_training(net, [images])}, images


def onnx_bytes(net: nn.Module, images: Tensor) -> int:
    """Size of its ONNX file."""
    with tempfile.TemporaryDirectory() as folder:
        formats.write_onnx(net, images, Path(folder))
        return (Path(folder) / formats.ONNX).stat().st_size


def measured(depth: int, batch_size: int, threads: int, repeats: int) -> dict[str, Any]:
    """Milliseconds, images/s and bytes of both, and their ratios."""
    nets, images = both(depth, batch_size)
    times = Latency(threads, [batch_size], repeats).measure(nets, images)
    found: dict[str, Any] = {"vnni": vnni(), "threads": threads, "batch_size": batch_size, "depth": depth}
    for name, each in nets.items():
        milliseconds = times[name][str(batch_size)]
        speed = batch_size / milliseconds["median"] * 1e3
        size = onnx_bytes(each, images)
        found[name] = {"latency_ms": milliseconds, "images_per_second": speed, "onnx_bytes": size}
    found["speedup"] = found["int8"]["images_per_second"] / found["float32"]["images_per_second"]
    found["size_ratio"] = found["int8"]["onnx_bytes"] / found["float32"]["onnx_bytes"]
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depth", type=int, default=20)
    parser.add_argument("--batch_size", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--out", type=Path, default=Path("int8_speed.json"))
    options = parser.parse_args(argv)
    told = setting() | measured(options.depth, options.batch_size, options.threads, options.repeats)
    options.out.write_text(json.dumps(told, indent=2) + "\n")
    for name in ("float32", "int8"):
        print(f"{name:8} {told[name]['images_per_second']:10,.0f} images/s {told[name]['onnx_bytes']:10,} bytes")
    bound = f"(expected: at least {FASTER})" if told["vnni"] else "(no VNNI: no bound)"
    print(f"int8 over float32: {told['speedup']:.2f} in speed {bound}, {told['size_ratio']:.3f} in size")
    if told["size_ratio"] > SMALLER or (told["vnni"] and told["speedup"] < FASTER):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
