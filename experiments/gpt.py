"""A small GPT learns to write from one text: train, validate, sample.

    python experiments/gpt.py                                                     # Python's own documentation, embedded
    python experiments/gpt.py --data.path input.txt --trainer.max_steps 2000      # nanoGPT's CPU recipe
    python experiments/gpt.py --sample "ROMEO:" --run runs/gpt/RUN                # go on from a prompt
    python experiments/gpt.py --help

Nine tenths of the text train, the last one is validated on, all of it. OUT/ holds results.json and .md, and for each
seed a TensorBoard run, the weights and the vocabulary.
"""

import json
from argparse import Namespace
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import datamodules
import strategies
from apprentice.errors import BadInput
from apprentice.keyed import with_seed
from harness import config as cli
from harness.reports.metrics import BITS
from harness.reports.pages import header
from harness.reports.results import load_results
from harness.reports.tables import Table, count, short
from harness.runs import environment, job, launch, session, signals
from harness.runs.files import write_json, write_text
from harness.runs.fit import MakeTrainer
from harness.runs.nets import load_net, spec
from harness.runs.progress import quiet
from harness.runs.tensorboard import indented, log_text
from harness.runs.trainer import trainers
from harness.studies.distillation import Candidate, DistillationStudy, Facts
from lit_modules import nets
from lit_modules.language_model import LitLanguageModel

NAME = "gpt"  # of the net's folder
NOT_COMPILED = strategies.PipelineStrategy, strategies.FSDP, strategies.RPCHybrid


@dataclass
class Options(cli.RunOptions):
    """Options of the language model.

    Args:
        compile: let torch.compile make kernels for the net, on one device or under ddp.
        sample: a prompt; nothing is trained, the net in --run goes on from it.
        run: the folder of a finished run.
        samples: how many texts to write, after training too.
        temperature: divides the logits; 0 takes the likeliest token.
        top_k: draw from so many of the likeliest tokens; from all when not given.
        sample_seed: of the draws.
    """

    seeds: int | list[int] = 1
    compile: bool = False
    sample: str | None = None
    run: str | None = None
    samples: int = 1
    temperature: float = 0.8
    top_k: int | None = None
    sample_seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.sample is None) != (self.run is None):
            flag, other = ("sample", "--run FOLDER") if self.run is None else ("run", "--sample PROMPT")
            raise BadInput(flag, getattr(self, flag), f"{other} beside it")
        if self.samples < 1:
            raise BadInput("samples", self.samples, "a number of texts, at least 1")
        if not 0 <= self.temperature < float("inf"):
            raise BadInput("temperature", self.temperature, "0 or more")
        if self.top_k is not None and self.top_k < 1:
            raise BadInput("top_k", self.top_k, "at least 1")


def parser() -> cli.Parser:
    """What can be chosen: text, net, how it is trained."""
    parser = cli.Parser("gpt.py", (__doc__ or "").split("\n", 1)[0], Options)
    parser.add_class("data", datamodules.Text)
    parser.add_choice("net", (nets.Net, nn.Module), nets, "GPT", skip={"vocab_size", "block_size"})
    parser.add_class("model", LitLanguageModel, skip={"net", "tokens_per_character", "compiled", "seed"})
    steps = {"max_epochs": -1, "max_steps": 800, "val_check_interval": 200, "check_val_every_n_epoch": None}
    parser.add_trainer(strategies.NAMES, log_every_n_steps=50, **steps)
    return parser


class Builder:
    """What is made of the configuration, for each seed anew."""

    def __init__(self, config: Namespace, data: datamodules.Text, trainer: MakeTrainer) -> None:
        self.config, self.data, self.trainer = config, data, trainer
        self.used: dict[str, int] = {}

    def module(self, seed: int) -> tuple[LitLanguageModel, dict[str, Candidate]]:
        """The module, its net's first weights from the seed alone, and how to rebuild that."""
        config, given = self.config, self.data.net_arguments
        net = with_seed(seed, lambda: cli.build(config.net, "net", **given))
        if config.trainer.init_args.get("precision") in {"64-true", "64", 64}:
            net = net.double()
        rebuilt = spec(config.net.class_path, cli.arguments(config.net, "net", **given))
        tokens = self.data.tokens_per_character
        learning = {"tokens_per_character": tokens, "compiled": config.compile, "seed": seed}
        module = cli.build(config.model, "model", net=net, **learning)
        return module, {NAME: Candidate(net, rebuilt, "CrossEntropy", config.net.init_args)}

    def check(self) -> None:
        """Build everything once, so that what can't work is refused before anything is trained."""
        trainer = self.trainer()
        place = trainer.distributed_sampler_kwargs or {"num_replicas": 1}
        self.data.check_replicas(place["num_replicas"], self.config.exact)
        self.used = self.data.used(trainer)
        if self.config.compile and isinstance(trainer.strategy, NOT_COMPILED):
            expected = "false with this --trainer.strategy, under which the net is not called as a whole"
            raise BadInput("compile", True, expected)
        module, again = (self.module(self.config.seeds[0])[0] for _ in range(2))
        nets.check_same_start(module.net, again.net)
        if not all(hasattr(module.net, name) for name in ("generate", "block_size")):
            raise BadInput("net", self.config.net.name, "a language model with generate() and block_size, as GPT")
        logits = (*self.data.input_shape, self.data.num_classes)
        # A GPU that this process has asked could not be used in forked ranks.
        with nullcontext() if trainer.strategy.root_device.type == "cpu" else nets.any_kernel(module.net):
            nets.check_fits(module.net, self.data.example, logits)
        if isinstance(trainer.strategy, strategies.PipelineStrategy):
            with cli.refusals(self.config.net, "net"):
                module.pipeline_stages()
        if isinstance(trainer.strategy, strategies.DataParallel):
            trainer.strategy.check_module(module)


def run(config: Namespace, builder: Builder, out: Path, settings: dict[str, Any]) -> None:
    """Train, test, write."""
    tensorboard = config.trainer.init_args["logger"] is not False
    bake_off = DistillationStudy(out, builder.data, builder.trainer, config.checkpoint_every, tensorboard)
    stages = []
    for seed in config.seeds:
        stages.append(bake_off.stage(seed, NAME, partial(builder.module, seed)))
        if fault := stages[-1]["runs"].get(NAME, {}).get("failed"):
            when = f"with seed {seed} its {fault['term']} is not finite at step {fault['step']}"
            raise BadInput("model.lr", config.model.init_args["lr"], f"settings that train the net; {when}")
    if not job.is_main_process():
        return
    texts = {}
    for seed in config.seeds:
        folder = out / f"seed{seed}" / NAME
        write_json(folder / "vocabulary.json", {"characters": builder.data.vocabulary.characters})
        texts[str(seed)] = written(folder, builder.data.vocabulary.start, config)
        if tensorboard:
            log_text(folder, "sample", "\n\n".join(texts[str(seed)]))
    results = session.header(NAME, builder.data, builder.used, settings, config.seeds) | {
        "metric": {"name": BITS.name, "higher_is_better": False},
        "runs": [stage["runs"][NAME] | {"fit_seconds": stage["fit_seconds"]} for stage in stages],
        "samples": texts,
    }
    first = texts[str(config.seeds[0])][0]
    write_text(out / "results.md", "\n\n".join([header(results), table(results).markdown(), indented(first)]))
    write_json(out / "results.json", results)
    print(f"{first}\n\n{table(results).plain()}\n\n{out}/results.md, .json; curves: tensorboard --logdir {out}")


def table(results: Facts) -> Table:
    """A line for each seed."""
    header = ["seed", "parameters", "held-out loss", "bits a character", "perplexity", "step, ms", "training, s"]
    keys = ("test_loss", "test_bpc", "test_perplexity")
    rows = [
        [str(seed), count(facts["parameters"]), *(f"{facts[key]:.4f}" for key in keys), short(facts["step_ms"]),
         short(facts["fit_seconds"])]
        for seed, facts in zip(results["seeds"], results["runs"], strict=True)
    ]  # fmt: skip
    return Table(header, rows)


def written(folder: Path, prompt: str, config: Namespace) -> list[str]:
    """Texts by the net in this folder, each until its block is full."""
    net: Any = load_net(folder)
    vocabulary = datamodules.Vocabulary(**json.loads((folder / "vocabulary.json").read_text("utf-8")))
    tokens = vocabulary.encode(prompt, "sample")
    if not 1 <= len(tokens) <= net.block_size:
        raise BadInput("sample", repr(prompt), f"1 to {net.block_size} tokens, the net's block size; not {len(tokens)}")
    drawing = {"temperature": config.temperature, "top_k": config.top_k, "seed": config.sample_seed}
    with nets.any_kernel(net):  # here is the CPU, wherever it was trained
        return [vocabulary.decode(text) for text in net.generate(tokens.expand(config.samples, -1), **drawing)]


def sample(config: Namespace) -> None:
    """Print what a finished run's net, of its first seed, makes of the prompt."""
    results = load_results(config.run)
    if results["experiment"] != NAME:
        raise BadInput("run", config.run, f"a run of gpt.py; this one is of {results['experiment']}.py")
    folder = Path(config.run) / f"seed{results['seeds'][0]}" / NAME
    print(*written(folder, config.sample, config), sep="\n\n")


def main(argv: Sequence[str] | None = None) -> None:
    """Train, or write, as the command line says."""
    command = parser()
    with cli.one_line_errors(command), signals.handled(), quiet():
        config = command.parse(argv)
        if config.sample is not None:
            sample(config)
            return
        strategies.register()
        trainer = trainers(config.trainer, config.exact, strategies.NAMES)
        launch.join(trainer)
        data = cli.build(config.data, "data")
        with job.main_first("data"):
            data.setup()
        environment.keep_memory()
        torch.backends.cudnn.allow_tf32 = False  # float32 means float32
        builder = Builder(config, data, trainer)
        builder.check()
        with session.opened(NAME, command, config) as out:
            session.describe(out, command, config)
            run(config, builder, out, command.as_dict(config))


if __name__ == "__main__":
    main()
