"""The language model study: a net for each seed, its held-out loss, and texts that it writes."""

import json
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from apprentice.errors import BadInput
from datamodules import Subwords, Text, Vocabulary, vocabulary_of
from harness.jobs.base import Launcher
from harness.reports import html
from harness.reports.measures import PARAMETERS
from harness.reports.notes import planned_epochs, say_epochs
from harness.reports.pages import head
from harness.reports.results import load_results
from harness.reports.tables import Table, paragraph, short
from harness.runs.files import read_text, write_json, write_text
from harness.runs.launch import is_main_process
from harness.runs.nets import load_net, read_spec
from harness.runs.plans import Arm, FitPlan
from harness.runs.records import FitRecord, reading
from harness.runs.session import Session
from harness.runs.tensorboard import indent, log_means, log_text
from harness.studies.fits import fit, is_finished
from harness.studies.launched import KEY, build_launcher, run_jobs, without_jobs
from lit_modules import nets
from lit_modules.language_model import LitLanguageModel
from lit_modules.nets.generation import Sampling, generate, row_keys
from lit_modules.tasks import BITS

GGUF, WRITTEN = ".gguf", 128  # files of llama.cpp; tokens at most that a model of others writes after a prompt
NAME = "gpt"  # of the experiment, of its fit and of the net's folder


Build = Callable[[Session, int], LitLanguageModel]  # a seed's module


def launcher_of(run: Session) -> Launcher | None:
    """Return the engine of jobs that is chosen; BadInput if it can't be used."""
    launcher = build_launcher(run)
    if launcher is not None and launcher.students is not None:
        raise BadInput(f"{KEY}.students", launcher.students, "it left out: a seed has one net")
    return launcher


def train(run: Session, plan: FitPlan, build: Build, plans: Sequence[FitPlan] = ()) -> FitRecord:
    """Train and test a seed's net, unless that is done."""
    with without_jobs(run, plan):
        return fit(run, plan, lambda plan: build(run, plan.seed), plans)


def run_study(run: Session, build: Build, launcher: Launcher | None = None) -> None:
    """Train and test a net for each seed, as jobs of a launcher if there is one; let each write, and save the table."""
    run.describe()
    out, records, vocabulary = run.out, [], cast("Text", run.data).vocabulary
    log_means(run, [NAME])
    arm, epochs = Arm(NAME, "net"), run.config.trainer.init_args["max_epochs"]
    plans = [FitPlan(seed, NAME, (arm,), epochs) for seed in run.config.seeds]
    if launcher is not None:
        run_jobs(run, launcher, build, [plan for plan in plans if not is_finished(run, plan)])
    for plan in plans:
        records.append(train(run, plan, build, plans))
        if fault := records[-1].fault(NAME):
            rate = run.config.model.init_args["lr"]
            raise BadInput("model.lr", rate, f"settings that train the net; with seed {plan.seed} {fault}")
    if not is_main_process():
        return
    log_means(run, [NAME])
    samples = []
    for seed in run.config.seeds:
        folder = out / f"seed{seed}" / NAME
        write_json(folder / "vocabulary.json", vocabulary.plain())
        samples.append(_generate(folder, vocabulary.start, run.config))
        if run.tensorboard:
            log_text(folder, "sample", "\n\n".join(samples[-1]))
    header, texts = run.header(), dict(zip(map(str, run.config.seeds), samples, strict=True))
    by_seed, first, ended = table(header.seeds, records), samples[0][0], list[str]()
    if header.config["trainer"].get("max_time") is not None:
        trained = [record.nets[NAME].trained_epochs for record in records]
        ended = say_epochs({NAME: trained}, {NAME: planned_epochs(header)})
    page = "\n\n".join([head(header, BITS), by_seed.markdown(), *ended, indent(first)])
    write_text(out / "results.md", page)
    write_text(out / "report.html", html.page(page, {}))
    metric = {"name": BITS.name, "higher_is_better": False}
    runs = [record.nets[NAME].to_json() | {"fit_seconds": record.fit_seconds} for record in records]
    write_json(out / "results.json", {**header.to_json(), "metric": metric, "runs": runs, "samples": texts})
    printed = "\n\n".join([first, by_seed.plain(), *map(paragraph, ended)])
    print(f"{printed}\n\n{out}/report.html, results.md, .json; curves: tensorboard --logdir {out}")


def table(seeds: Sequence[int], records: Sequence[FitRecord]) -> Table:
    """Return a line for each seed."""
    header = ["seed", "parameters", "held-out loss", "bits a character", "perplexity", "step, ms", "training, s"]
    rows = []
    for seed, record in zip(seeds, records, strict=True):
        figures = record.nets[NAME].figures
        scores = [f"{figures[key]:.4f}" for key in ("test_loss", "test_bpc", "test_perplexity")]
        times = short(figures["step_ms"]), short(record.fit_seconds)
        rows.append([str(seed), PARAMETERS.text(figures["parameters"]), *scores, *times])
    return Table(header, rows)


def _generate(folder: Path, prompt: str, config: Namespace) -> list[str]:
    """Continue the prompt by the net in a folder, to texts as long as its block."""
    net: Any = load_net(folder)
    return _continue(net, read_vocabulary(folder), net.init_args["block_size"], config, prompt)


def _continue(
    net: Any, vocabulary: Vocabulary | Subwords, block_size: int | None, config: Namespace, prompt: str | None = None,
    new: int = sys.maxsize,
) -> list[str]:  # fmt: skip
    """Continue a prompt, by default `--sample`, by `new` tokens at most, to a text of `block_size` at most."""
    prompt = config.sample if prompt is None else prompt
    tokens = vocabulary.encode(prompt, "sample")
    most = min(len(tokens) + new, sys.maxsize if block_size is None else block_size)
    if not 1 <= len(tokens) <= most:
        raise BadInput("sample", repr(prompt), f"1 to {most} tokens, the net's block size; not {len(tokens)}")
    with nets.any_kernel(net):  # on the CPU, wherever the net was trained
        if isinstance(net, nets.GPT):
            drawing = {"temperature": config.temperature, "top_k": config.top_k, "seed": config.sample_seed}
            texts = [*net.generate(tokens.expand(config.samples, -1), **drawing)]
        else:
            texts = _draw(net, vocabulary, tokens, most - len(tokens), config)
    return [vocabulary.decode(text) for text in texts]


def _draw(net: Any, vocabulary: Vocabulary | Subwords, prompt: Tensor, most: int, config: Namespace) -> list[Tensor]:
    """Continue a prompt (t,) by `most` tokens at most, up to the end token; return texts (t + new,)."""
    samples, sampling = torch.arange(config.samples), Sampling(config.temperature, config.top_k)
    end = vocabulary.tokenizer.eos_token_id if isinstance(vocabulary, Subwords) else None
    ends, lengths = [] if end is None else [end], torch.full_like(samples, len(prompt))
    keys = row_keys(samples, config.sample_seed)
    drawn = generate(net, prompt.expand(config.samples, -1), lengths, most, keys, sampling, ends)
    pairs = zip(drawn.tokens, drawn.lengths.tolist(), strict=True)
    return [torch.cat([prompt, tokens[:length]]) for tokens, length in pairs]


def read_vocabulary(folder: Path) -> Vocabulary | Subwords:
    """Read the vocabulary of a net's folder; BadInput if its file is damaged, or of another net."""
    with reading(folder, "run", "a net's folder with a readable vocabulary.json"):
        vocabulary = vocabulary_of(json.loads(read_text(folder / "vocabulary.json")))
        if len(vocabulary) != read_spec(folder)["init_args"].get("vocab_size", len(vocabulary)) or not len(vocabulary):
            raise ValueError(f"{len(vocabulary)} tokens are not the net's")
    return vocabulary


def sample(config: Namespace) -> Sequence[str]:
    """Continue `--sample` by the net in `--run`; BadInput if one can't be used.

    `--run` is a run of gpt.py, whose first seed's net is taken, a net's folder as RUN/seed0/kd, or a GGUF file
    or the folder of a model of transformers.
    """
    folder = Path(config.run)
    if (folder / "net.yaml").is_file():
        return _generate(folder, config.sample, config)
    if (folder / "config.json").is_file() or folder.suffix == GGUF or [*folder.glob(f"*{GGUF}")]:
        try:
            vocabulary = Subwords(config.run)
            net = nets.HuggingFaceLM(config.run, len(vocabulary), 1, pretrained=True).eval()
        except BadInput as fault:
            raise BadInput("run", config.run, fault.expected) from None
        return _continue(net, vocabulary, net.block_size, config, new=WRITTEN)
    results = load_results(config.run)
    if results["experiment"] != NAME:
        of_kd = f"; or one of its nets' folders, as {folder}/seed0/kd" if results["experiment"] == "kd" else ""
        raise BadInput("run", config.run, f"a run of gpt.py; this one is of {results['experiment']}.py{of_kd}")
    return _generate(folder / f"seed{results['seeds'][0]}" / NAME, config.sample, config)
