"""A small GPT learns to write from one text: train, validate, sample.

    python experiments/gpt.py                                                     # Python's own documentation, embedded
    python experiments/gpt.py --data.path input.txt --trainer.max_steps 2000      # of nanoGPT's size for a CPU
    python experiments/gpt.py --sample "ROMEO:" --run runs/gpt/RUN                # go on from a prompt

The last tenth of the text tests; of the rest nine tenths train and the end validates. OUT/ holds report.html,
results.json and .md, and for each seed a TensorBoard run, the weights and the vocabulary.
"""

from harness import start

if __name__ == "__main__":
    # Threads that wait spin for microseconds, not longer: see docs/language-models.md.
    start.script(OMP_WAIT_POLICY="PASSIVE", GOMP_SPINCOUNT="5000")

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

from torch import nn

import datamodules
from apprentice.errors import BadInput
from harness import cli
from harness.jobs.engines import LAUNCHERS
from harness.runs.callbacks import check_callbacks
from harness.runs.session import Session, session
from harness.studies.choices import build_net, check_modules, check_net
from harness.studies.language_model import NAME, launcher_of, run_study, sample, train
from harness.studies.launched import do_work, is_job
from lit_modules import nets
from lit_modules.language_model import LitLanguageModel
from strategies.base.shared_replica import SharedReplica

MOST_SAMPLES = 1000  # a net writes them as one batch


@dataclass
class Options(cli.RunOptions):
    """Options of the language model.

    Args:
        compile: let torch.compile make kernels for the net, on one device or under ddp.
        sample: a prompt that the net in --run continues; nothing is trained.
        run: the folder of a finished run, of a net as RUN/seed0/kd, or of a model of transformers.
        samples: how many texts to write, after training too.
        temperature: divides the logits; 0 takes the likeliest token.
        top_k: draw from so many of the likeliest tokens; from all when not given.
        sample_seed: of the draws.
    """

    seeds: int | list[int] = field(default=1, metadata=cli.GROWS.metadata)
    compile: bool = False
    sample: str | None = None
    run: str | None = None
    samples: int = 1
    temperature: float = 0.8
    top_k: int | None = None
    sample_seed: int = 0
    idle: ClassVar[Collection[str]] = ("num_classes",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.sample is None) != (self.run is None):
            flag, other = ("sample", "--run FOLDER") if self.run is None else ("run", "--sample PROMPT")
            raise BadInput(flag, getattr(self, flag), f"{other} beside it")
        if not 1 <= self.samples <= MOST_SAMPLES:
            raise BadInput("samples", self.samples, f"a number of texts, at least 1, at most {MOST_SAMPLES}")
        if not 0 <= self.temperature < float("inf"):
            raise BadInput("temperature", self.temperature, "0 or more")
        if self.top_k is not None and self.top_k < 1:
            raise BadInput("top_k", self.top_k, "at least 1")


def parser() -> cli.Parser:
    """The command line: text, net, module, trainer."""
    parser = cli.Parser("gpt.py", (__doc__ or "").split("\n", 1)[0], Options)
    parser.add_class("data", datamodules.Text)
    net = cli.Classes((nets.Net, nn.Module), nets, frozenset({"vocab_size", "block_size"}))
    parser.add_choice("net", net, "GPT")
    parser.add_class("model", LitLanguageModel, skip={"net", "tokens_per_character", "compiled", "seed"})
    steps: dict[str, Any] = {"max_epochs": -1, "max_steps": 800}
    steps |= {"val_check_interval": 200, "check_val_every_n_epoch": None}
    fixed = cli.OnResume(why="the learning rate of each step depends on how many there are")
    on_resume = {"max_steps": fixed, "max_epochs": fixed}
    parser.add_trainer(on_resume=on_resume, log_every_n_steps=50, **steps)
    parser.add_choice("launcher", LAUNCHERS, on_resume=cli.FREE)
    return parser


def module(run: Session, seed: int) -> LitLanguageModel:
    """Build a seed's module."""
    config, net = run.config, build_net(run, "net", seed)
    rate = cast("datamodules.Text", run.data).tokens_per_character
    options = {"tokens_per_character": rate, "compiled": config.compile, "seed": seed}
    model: LitLanguageModel = cli.build(config.model, "model", net=net, **options)
    return model


def check(run: Session) -> None:
    """Build everything once; raise BadInput if something can't be trained."""
    trainer, config = run.checked_trainer(), run.config
    if config.compile and isinstance(trainer.strategy, SharedReplica):
        expected = "false with this --trainer.strategy, under which the net is not called as a whole"
        raise BadInput("compile", True, expected)
    model = module(run, config.seeds[0])
    if not all(hasattr(model.net, name) for name in ("generate", "block_size")):
        raise BadInput("net", config.net.name, "a language model with generate() and block_size, as GPT")
    check_net(run, "net", trainer)
    check_modules(run, trainer, model)
    check_callbacks(run, trainer, {NAME: model})


def main(argv: Sequence[str] | None = None) -> None:
    """Train, or write, as the command line says."""
    with session(NAME, parser(), argv) as run:
        if run.config.sample is not None:
            print(*sample(run.config), sep="\n\n")
            return
        if is_job():
            do_work(run, lambda session, plan: train(session, plan, module))
            return
        run.announce()
        check(run)
        launcher = launcher_of(run)
        with run.folder():
            run_study(run, module, launcher)


if __name__ == "__main__":
    start.run(main)
