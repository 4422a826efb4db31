"""What a stored teacher costs and loses: size, time, loss and gradient against k, for a teacher of Hugging Face.

    python benchmarks/teacher_top_k.py FOLDER gsm8k/train.jsonl                # 70 CPU seconds, one thread
    python benchmarks/teacher_top_k.py FOLDER gsm8k/train.jsonl --train 16     # trains a student by each row

FOLDER is a Llama-like model of transformers, such as the one whose path `benchmarks/smollm2.py` prints. The data have
the columns `question` and `answer`. A student is the teacher without one of its layers, near to it; another is its
first and last quarter, far from it. Each row compares the forward KL divergence at temperature 1, and its gradient on
the student's logits, with those of the teacher's whole distribution, over all response tokens. With `--train N` the
rows are those of a student with half of SmolLM2's blocks that has trained by each form on N texts, one a step: its
forward KL divergence from the whole distribution, and its cross-entropy, on `--texts` others.
"""

import argparse
import copy
import math
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from apprentice.batch import label_mask
from benchmarks.lm_speed import BLOCKS
from datamodules import Chat
from lit_modules.nets import HuggingFaceLM, Outputs
from lit_modules.objectives import Hinton
from lit_modules.text.stored_teacher.forms import Form

FORMS = [Form(k, "bucket", (1.0, 2.0)) for k in (8, 32, 128)]
FORMS += [Form(32, "renormalize", ()), Form(32, "sample", (1.0,)), Form(None, "bucket", ())]


def layers_of(net: HuggingFaceLM) -> nn.ModuleList:
    """Return the layers of a Llama-like model."""
    layers = net.get_submodule("model.model.layers")
    assert isinstance(layers, nn.ModuleList)
    return layers


def without_layers(teacher: HuggingFaceLM, kept: Sequence[int]) -> HuggingFaceLM:
    """Return a copy with these layers alone."""
    student = copy.deepcopy(teacher)
    layers = layers_of(student)
    student.get_submodule("model.model").layers = nn.ModuleList([layers[i] for i in kept])
    return student


def gradient(z_s: Tensor, teacher: Outputs) -> tuple[float, Tensor]:
    """Return the sum over tokens of the loss, and its gradient (1, n, V), of logits (1, n, V)."""
    z_s = z_s.detach().requires_grad_()
    labels = torch.zeros(z_s.shape[:2], dtype=torch.int64)
    loss = Hinton(1.0)(Outputs(z_s, {}), teacher, labels)["kd"].values.sum()
    return loss.item(), torch.autograd.grad(loss, z_s)[0]


def prepare(args: argparse.Namespace) -> tuple[Chat, HuggingFaceLM]:
    """Return the data and the teacher."""
    data = Chat(args.data, prompt="question", response="answer", tokenizer=args.model, batch_size=4, max_length=512)
    data.setup()
    return data, HuggingFaceLM(args.model, data.num_classes, data.block_size, pretrained=True).eval()


def kl_and_ce(student: HuggingFaceLM, texts: Sequence[tuple[Tensor, Tensor, Tensor]]) -> tuple[float, float]:
    """Return means over tokens: KL(p_t || p_s), and the cross-entropy."""
    kl, ce, count = 0.0, 0.0, 0
    for inputs, labels, z_t in texts:
        with torch.no_grad():
            log_s = student(inputs)[label_mask(labels)].log_softmax(-1)
        kl += F.kl_div(log_s, z_t.log_softmax(-1), reduction="sum", log_target=True).item()
        ce += F.nll_loss(log_s, labels[label_mask(labels)].long(), reduction="sum").item()
        count += len(z_t)
    return kl / count, ce / count


def train(args: argparse.Namespace) -> list[str]:
    """Train a student by each form; return the rows of the table."""
    data, teacher = prepare(args)
    texts = []
    for chunk in torch.arange(args.train + args.texts).split(1):
        inputs, labels = data.samples("train", chunk)
        with torch.no_grad():
            texts.append((inputs, labels, teacher(inputs)[label_mask(labels)]))
    training, others = texts[: args.train], texts[args.train :]
    start = without_layers(teacher, args.blocks)
    rows = ["untrained | {:.3f} | {:.3f}".format(*kl_and_ce(start, others))]
    for form in FORMS:
        student, tokens = copy.deepcopy(start), 0
        optimizer = torch.optim.AdamW(student.parameters(), lr=args.lr)
        for inputs, labels, z_t in training:
            counts = label_mask(labels)
            taught = form.expand(form.reduce(z_t, tokens), torch.ones(1, len(z_t), dtype=torch.bool))
            outputs = Outputs(student(inputs)[counts][None], {})
            optimizer.zero_grad()
            Hinton(1.0)(outputs, taught, labels[counts][None])["kd"].values.mean().backward()
            optimizer.step()
            tokens += len(z_t)
        rows.append("{} | {:.3f} | {:.3f}".format(form, *kl_and_ce(student, others)))
    return rows


def measure(args: argparse.Namespace) -> list[str]:
    """Return the rows of the table."""
    data, teacher = prepare(args)
    everything = sum(int(data.split(part).labels.sum()) for part in ("train", "validation", "test"))
    count = len(layers_of(teacher))
    quarter = count // 4
    students = {
        "near": without_layers(teacher, [i for i in range(count) if i != count // 2]),
        "far": without_layers(teacher, [*range(quarter + 1), *range(count - quarter, count)]),
    }
    seconds: dict[Form | str, float] = defaultdict(float)
    sums: dict[tuple[Form, str], Tensor] = defaultdict(lambda: torch.zeros(3, dtype=torch.float64))
    sizes: dict[Form, int] = {}
    tokens = 0
    for chunk in torch.arange(args.texts).split(1):
        inputs, labels = data.samples("train", chunk)
        counts = label_mask(labels)
        with torch.no_grad():
            start = time.perf_counter()
            z_t = teacher(inputs)[counts]
            seconds["teacher"] += time.perf_counter() - start
            of_students = {name: student(inputs)[counts][None] for name, student in students.items()}
        for form in FORMS:
            start = time.perf_counter()
            entries = form.reduce(z_t, tokens)
            seconds[form] += time.perf_counter() - start
            sizes[form] = sum(x[0].nbytes for x in entries.values())  # bytes a token
            stored = form.expand(entries, torch.ones(1, len(z_t), dtype=torch.bool))
            for name, z_s in of_students.items():
                whole = gradient(z_s, Outputs(z_t[None], {}))[1]
                loss, found = gradient(z_s, stored)
                sums[form, name] += torch.tensor([loss, (found - whole).square().sum(), whole.square().sum()])
        tokens += len(z_t)
    rows = [f"{tokens:,} response tokens of {args.texts} texts; the teacher took {seconds['teacher']:.0f} s"]
    for form in FORMS:
        size = sizes[form]
        parts = [str(form), f"{size:,}", f"{size * everything / 1e6:,.0f}", f"{seconds[form] / seconds['teacher']:.3f}"]
        for name in students:
            loss, error, norm = sums[form, name].tolist()
            parts += [f"{loss / tokens:.4f}", f"{math.sqrt(error / norm):.4f}"]
        rows.append(" | ".join(parts))
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder of transformers")
    parser.add_argument("data", type=Path, help="JSON lines")
    parser.add_argument("--texts", type=int, default=12)
    parser.add_argument("--train", type=int, default=0, help="texts that a student trains on by each row")
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--blocks", type=int, nargs="+", default=BLOCKS, help="that this student has")
    args = parser.parse_args(argv)
    print("\n".join(train(args) if args.train else measure(args)))


if __name__ == "__main__":
    main()
