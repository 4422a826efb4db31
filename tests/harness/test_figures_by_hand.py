"""Each figure of a table, computed again from saved weights and data: by plain torch and numpy, written out here."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import t
from torch import Tensor, nn
from torch.nn import functional as F

from datamodules import Chat, Digits, Text
from datamodules.base import InMemoryData
from experiments import gpt, kd
from harness.runs.nets import load_net
from tests.chats import write_lines
from tests.commands import results

WIDTH, LAYERS = 8, 2
GPT = [f"={size}" for size in (LAYERS, 1, WIDTH)]
SIZES = ("num_layers", "num_heads", "embed_dim")


def small(flag: str) -> list[str]:
    return [flag, "GPT", *(f"{flag}.{name}{size}" for name, size in zip(SIZES, GPT, strict=True))]


def cells(page: Path, first: str, name: str) -> dict[str, str]:
    """The cells of a row by their headings, in the table of a page whose heading begins so."""
    lines = page.read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {first} |"))
    row = next(line for line in lines[start:] if line.startswith(f"| {name} |"))
    return dict(zip(*([cell.strip() for cell in line.split("|")] for line in (lines[start], row)), strict=True))


def signed(values: tuple[float, float, float], digits: int) -> str:
    mean, low, high = (f"{x:+.{digits}f}" if round(x, digits) else f"{0:.{digits}f}" for x in values)
    return f"{mean} [{low}, {high}]"


def interval(differences: np.ndarray, comparisons: int = 1) -> tuple[float, float, float]:
    """Mean and interval by Student's t, at a confidence of 1 - 0.05 / comparisons."""
    mean, count = differences.mean(), len(differences)
    half = t.ppf(1 - 0.025 / comparisons, count - 1) * differences.std(ddof=1) / math.sqrt(count)
    return mean, mean - half, mean + half


def crossed(differences: np.ndarray) -> tuple[float, float, float]:
    """Mean and interval over seeds and test samples, of differences (seeds, samples): two-way random effects."""
    (s, n), mean = differences.shape, differences.mean()
    rows, columns = differences.mean(1, keepdims=True), differences.mean(0, keepdims=True)
    rest = ((differences - rows - columns + mean) ** 2).sum() / ((s - 1) * (n - 1))
    a, b = n * rows.var(ddof=1), s * columns.var(ddof=1)
    half = math.sqrt((t.ppf(0.975, s - 1) ** 2 * a + t.ppf(0.975, n - 1) ** 2 * max(b - rest, 0)) / (s * n))
    return mean, mean - half, mean + half


def check_differences(found: Any, page: Path, key: str, scale: float, digits: int) -> None:
    """Differences to ce, alone and corrected by Holm's procedure; the table's mean, deviation and difference."""
    students = found["students"]
    paired = {name: np.array(of[key]) - np.array(students["ce"][key]) for name, of in students.items() if name != "ce"}
    p = {name: 2 * t.sf(abs(d.mean()) / d.std(ddof=1) * math.sqrt(len(d)), len(d) - 1) for name, d in paired.items()}
    left = len(p)
    for name in sorted(p, key=p.__getitem__):
        confidence, left = left, left - (p[name] < 0.05 / left)
        for what, expected in (
            ("delta_vs_ce", interval(paired[name])),
            ("delta_vs_ce_corrected", interval(paired[name], confidence)),
        ):
            assert [students[name][what][of] for of in ("mean", "low", "high")] == pytest.approx(expected, abs=1e-9)
        row = cells(page, "variant", name)
        unit = "points" if scale == 100 else "bits"
        assert row[f"Δ to ce, {unit}"] == signed(tuple(scale * x for x in interval(paired[name])), digits)
    for name, of in students.items():
        values = scale * np.array(of[key])
        shown = f"{values.mean():.{digits}f} ± {values.std(ddof=1):.{digits}f}"
        assert shown in cells(page, "variant", name).values()


def in_order(data: InMemoryData, seed: int, epochs: int) -> Iterator[Any]:
    """The batches of training."""
    data.order_seed = seed
    loader: Any = data.train_dataloader()
    for epoch in range(epochs):
        loader.sampler.set_epoch(epoch)
        yield from loader


def net_of(folder: Path) -> tuple[nn.Module, int]:
    """A net with its saved weights, and their number."""
    net = load_net(folder, "out").eval()
    saved = torch.load(folder / "weights.pt", weights_only=True)
    return net, sum(saved[name].numel() for name, _ in net.named_parameters())


# ---- images


@torch.no_grad()
def test_images(tmp_path: Path) -> None:
    """Accuracies, calibration, agreement, operations and parameters of LightNN, layer by layer."""
    sizes, run = {"train_size": 100, "test_size": 80, "validation_size": 20, "batch_size": 32}, tmp_path / "run"
    flags = [x for name, size in sizes.items() for x in (f"--data.{name}", str(size))]
    nets = ["--teacher", "LightNN", "--only", "ce", "kd", "cosine", "--seeds", "3", "--trainer.max_epochs", "2"]
    with torch.enable_grad():
        kd.main(["--data", "Digits", *flags, *nets, "--out", str(run)])
    found, data = results(run), Digits(**sizes)
    data.setup()
    x, y = data.samples("test", torch.arange(80))
    held, truth = data.samples("validation", torch.arange(20))
    products = (
        2 * (64 * 16 * 9) * 2 + 2 * (16 * 16 * 16 * 9 + 64 * 256 + 256 * 10) * 3
    )  # of the first no input's gradient
    right: dict[str, np.ndarray] = {}
    for name, of in {"teacher": found["teacher"], **found["students"]}.items():
        rows = []
        for seed in range(3):
            net, parameters = net_of(run / f"seed{seed}" / name)
            p = net(x).double().softmax(1)
            confidence, predicted = p.max(1)
            hits = predicted == y
            rows.append(hits.double().numpy())
            assert (of["test_acc"][seed], of["test_correct"][seed]) == (hits.double().mean(), hits.sum())
            bins = (confidence * 15).ceil().long() - 1
            gap = sum(abs((confidence - hits.double())[bins == b].sum().item()) for b in range(15)) / 80
            assert of["test_ece"][seed] == pytest.approx(gap, abs=1e-6)
            last = of["epochs"][seed][-1]
            assert last["val/loss"] == pytest.approx(F.cross_entropy(net(held), truth).item(), rel=1e-5)
            assert last["val/acc"] == pytest.approx((net(held).argmax(1) == truth).double().mean().item())
            if name != "teacher":
                q = net_of(run / f"seed{seed}" / "teacher")[0](x).double().softmax(1)
                assert of["test_agreement"][seed] == (q.argmax(1) == predicted).double().mean()
                assert of["test_kl"][seed] == pytest.approx((q * (q / p).log()).sum(1).mean().item(), abs=1e-7)
            assert (of["parameters"], of["train_flops"]) == (parameters, 2 * 100 * products)
        right[name] = np.stack(rows)
        row = cells(run / "results.md", "variant", name)
        assert (row["parameters"], row["cost, MFLOPs"]) == (f"{parameters:,}", f"{2 * 100 * products / 1e6:.3g}")
    check_differences(found, run / "results.md", "test_acc", 100, 2)
    for name in ("kd", "cosine"):
        beside = "Δ alone, over seeds and test samples, points"
        expected = tuple(100 * value for value in crossed(right[name] - right["ce"]))
        assert cells(run / "results.md", "variant | Δ alone, points", name)[beside] == signed(expected, 2)


# ---- texts and chats


def operations(rows: int, length: int, vocabulary: int) -> int:
    """Forward and backward of a GPT: products of its weights, and of softmax attention's queries, keys, values."""
    weights = 12 * LAYERS * WIDTH**2 + vocabulary * WIDTH
    return rows * length * (6 * weights + LAYERS * 14 * length * WIDTH)


def nats(net: nn.Module, inputs: Tensor, labels: Tensor) -> tuple[float, int]:
    """The sum of the losses of the tokens that count, and their number."""
    counts = labels >= 0
    return F.cross_entropy(net(inputs)[counts].double(), labels[counts], reduction="sum").item(), int(counts.sum())


@torch.no_grad()
def test_texts(tmp_path: Path) -> None:
    """Six steps of two nets on bytes, whose characters have other numbers of bytes in each part."""
    path, run = tmp_path / "text", tmp_path / "run"
    path.write_text("a plain beginning " * 40 + "grün und weiß, " * 12 + "漢字 " * 30)
    steps = ["--trainer.max_steps", "6", "--trainer.val_check_interval", "3", "--model.warmup_steps", "3"]
    flags = ["--data.path", str(path), "--data.vocabulary", "bytes", "--data.block_size", "16", "--seeds", "2"]
    with torch.enable_grad():
        gpt.main([*steps, *flags, *small("--variants.ce"), *small("--variants.two"), "--out", str(run)])
    found, data, content = results(run), Text(path, 16, "bytes"), path.read_bytes()
    data.setup()
    cut = len(content) * 9 // 10
    begin = cut - round(cut * 0.1)
    parts = {"val": content[begin:cut], "test": content[cut:]}
    for name, of in found["students"].items():
        for seed in range(2):
            net, parameters = net_of(run / f"seed{seed}" / name)
            for part, text in parts.items():
                tokens = torch.tensor([*text])
                total, last = 0.0, 0
                for start in range(0, len(tokens) - 1, 16):  # the last block ends with the text, and counts what is new
                    first = min(start, len(tokens) - 17)
                    labels = tokens[first + 1 : first + 17].clone()
                    labels[: last - first] = -100
                    total, last = total + nats(net, tokens[None, first : first + 16], labels[None])[0], first + 16
                loss, rate = total / (len(text) - 1), len(text) / len(text.decode(errors="replace"))
                logged = [epoch for epoch in of["epochs"][seed] if "val/loss" in epoch][-1]
                said = (
                    (logged["val/loss"], logged["val/bpc"])
                    if part == "val"
                    else (of["test_loss"][seed], of["test_bpc"][seed])
                )
                assert said == pytest.approx((loss, loss / math.log(2) * rate), rel=1e-5)
            assert of["parameters"] == parameters
        taken = [len(batch.inputs) for batch in in_order(data, 0, 2)][:6]
        assert of["train_flops"] == operations(sum(taken), 16, 256)
        assert of["flops_token"] * 16 == operations(1, 16, 256)
        assert of["cache_bytes_16"] == 2 * LAYERS * WIDTH * 4
        record = json.loads((run / "seed1" / "students.json").read_text())["nets"][name]
        assert record["tokens_per_second"] * record["step_ms"] / 1e3 == pytest.approx(12 * 16)


def conversations(folder: Path) -> Path:
    """Prompts with one to three answers of very unequal lengths, some of them beyond ASCII."""
    lines = [
        {"prompt": f"{i} plus {i}?", "response": f"{'grün ' * answer}{'x' * (i * i * 5 % 47)}{2 * i}"}
        for i in range(24)
        for answer in range(1 + i % 3)
    ]
    return write_lines(folder / "chat.jsonl", lines)


OPTIONS = {"batch_size": 4, "test_size": 10, "validation_size": 6, "sort_lengths": True}
CHAT = ["--data", "Chat", *(f"--data.{name}={json.dumps(value)}" for name, value in OPTIONS.items())]


@torch.no_grad()
def test_chats(tmp_path: Path) -> None:
    """Bits over the bytes of each part's responses, agreement, and operations of the batches as they were padded."""
    path, run = conversations(tmp_path), tmp_path / "run"
    flags = ["--data.path", str(path), *small("--teacher"), *small("--student"), "--only", "ce", "kd", "--seeds", "2"]
    with torch.enable_grad():
        kd.main([*CHAT, *flags, "--trainer.max_epochs", "2", "--out", str(run)])
    found, data = results(run), Chat(path, **OPTIONS)
    data.setup()
    sums: dict[str, list[list[float]]] = {}
    for name, of in {"teacher": found["teacher"], **found["students"]}.items():
        cost = []
        for seed in range(2):
            net, parameters = net_of(run / f"seed{seed}" / name)
            totals: dict[str, tuple[float, int, int]] = {}
            units: dict[str, tuple[float, int]] = {}
            for part in ("validation", "test"):
                texts = data.split(part)
                for place in range(len(texts.labels)):
                    inputs, labels = texts.take(torch.tensor([place]))
                    loss, tokens = nats(net, inputs, labels)
                    size = len(bytes(labels[0][labels[0] >= 0][:-1].tolist()))  # the last ends the response
                    before = totals.get(part, (0.0, 0, 0))
                    totals[part] = before[0] + loss, before[1] + tokens, before[2] + size
                    if part == "test":
                        prompt = data.vocabulary.decode(texts.prompt(place))
                        had = units.get(prompt, (0.0, 0))
                        units[prompt] = had[0] + loss, had[1] + size
            last = of["epochs"][seed][-1]
            for part, said in (
                ("validation", (last["val/loss"], last["val/bpb"])),
                ("test", (of["test_loss"][seed], of["test_bpb"][seed])),
            ):
                loss, tokens, size = totals[part]
                assert said == pytest.approx((loss / tokens, loss / math.log(2) / size), rel=1e-5)
            sizes = np.array([size for _, size in units.values()])
            bits = np.array([loss for loss, _ in units.values()]) / math.log(2) / sizes.mean()
            assert of["test_sample_bpb"][seed] == pytest.approx(bits, abs=1e-5)
            sums.setdefault(name, []).append(bits.tolist())
            shapes = [batch.inputs.shape for batch in in_order(data, seed, 2)]
            cost.append(sum(operations(*shape, 256) for shape in shapes))
            assert len({length for _, length in shapes}) > 3
            assert of["parameters"] == parameters
        assert of["train_flops"] == round(sum(cost) / 2)
    check_differences(found, run / "results.md", "test_bpb", 1, 3)
    differences = np.array(sums["kd"]) - np.array(sums["ce"])
    residuals = differences + differences.mean(1, keepdims=True) * (1 - sizes / sizes.mean())
    beside = cells(run / "results.md", "variant | Δ alone, bits", "kd")["Δ alone, over seeds and test prompts, bits"]
    assert beside == signed(crossed(residuals), 3)


def test_chats_side_by_side(tmp_path: Path) -> None:
    """What a token costs, by a batch of about the mean size, and not by the 16 tokens with which nets are tried."""
    path, run = conversations(tmp_path), tmp_path / "run"
    steps = ["--trainer.max_steps", "9", "--trainer.val_check_interval", "3", "--model.warmup_steps", "3"]
    limit = ["--data.path", str(path), "--data.max_length", "80", "--seeds", "1"]
    gpt.main([*CHAT, *limit, *steps, *small("--variants.ce"), "--out", str(run)])
    (of,), data = results(run)["students"].values(), Chat(path, max_length=80, **OPTIONS)
    data.setup()
    batches, of_epoch = [*in_order(data, 0, 2)], len(data.train_dataloader())
    areas = torch.tensor([batch.inputs.numel() for batch in batches[:of_epoch]]).double()
    typical = batches[int((areas - areas.mean()).abs().argmin())]
    texts = data.split("train")
    tokens = sum(len(texts.text(place)[0]) - 1 for place in texts.places.tolist())  # the last is no input
    assert of["tokens_per_second"] * of["step_ms"] / 1e3 == pytest.approx(tokens / of_epoch)
    length = typical.inputs.shape[1]
    assert of["flops_token"] * length == operations(1, length, 256)
    assert of["cache_bytes_80"] == 2 * LAYERS * WIDTH * 4
    assert of["train_flops"] == sum(operations(*batch.inputs.shape, 256) for batch in batches[:9])
