"""A small GPT learns to write from one text: train, validate, sample.

    python experiments/gpt.py                                                     # Python's own documentation, embedded
    python experiments/gpt.py --data.path input.txt --trainer.max_steps 2000      # of nanoGPT's size for a CPU
    python experiments/gpt.py --sample "ROMEO:" --run runs/gpt/RUN                # go on from a prompt
    python experiments/gpt.py --variants.mha GPT --variants.one GPT --variants.one.num_heads 1 --seeds 3    # compared

The last tenth of the text tests; of the rest nine tenths train and the end validates. OUT/ holds report.html,
results.json and .md, and for each seed a TensorBoard run, the weights and the vocabulary.

With --variants several nets train in one pass over the same batches, and one table compares them.
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
from harness.studies.choices import TextSets, build_net, check_modules, check_net, given_by_data
from harness.studies.deploy.language import write_language_models
from harness.studies.equal import Budget
from harness.studies.language_model import NAME, launcher_of, run_study, sample, train
from harness.studies.launched import do_work, is_job
from harness.studies.tuning import Tuning
from harness.studies.tuning.options import check_options
from harness.studies.variants import Variants, zoo_variants
from lit_modules import nets
from lit_modules.language_model import LitLanguageModel
from strategies.base.shared_replica import SharedReplica

LONGEST = 2**20  # tokens in a cache
MOST_SAMPLES = 1000  # a net writes them as one batch
BY_EPOCHS: dict[str, Any] = {  # a search compares settings after epochs
    "trainer.max_steps": -1, "trainer.max_epochs": 6, "trainer.val_check_interval": 1.0,
    "trainer.check_val_every_n_epoch": 1,
}  # fmt: skip


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
        only: of --variants, compare just these.
        zoo: compare a list of GPT's variants, those that can be trained here; the best comes first.
        equal: of --variants, scale the width of each to the first one's parameters, or to its operations a token; the
            number of heads stays.
        decode_at: of --variants, time decoding with so many tokens in the cache, as 1024 8192; nothing by default.
        tune: compare the best of N settings, of learning rate and weight decay, of each variant. Training is then of
            6 epochs in place of 800 steps.
        tune_seeds: how many seeds the search has, or a list of them, as [7,8]; default: 2.
        tune_optimizer: search learning rate and weight decay; default: true.
        tune_wave: settings that train side by side, at most; default: what memory holds.
    """

    seeds: int | list[int] = field(default=1, metadata=cli.GROWS.metadata)
    compile: bool = False
    sample: str | None = None
    run: str | None = None
    samples: int = 1
    temperature: float = 0.8
    top_k: int | None = None
    sample_seed: int = 0
    only: list[str] | None = field(default=None, metadata=cli.GROWS.metadata)
    zoo: bool = field(default=False, metadata=cli.GROWS.metadata)
    equal: Budget | None = None
    decode_at: list[int] | None = None
    tune: int | None = None
    tune_seeds: int | list[int] | None = None
    tune_optimizer: bool | None = None
    tune_wave: int | None = field(default=None, metadata=cli.FREE.metadata)
    idle: ClassVar[Collection[str]] = ("num_classes",)
    common: ClassVar[Collection[str]] = (
        "data", "data.path", "net", "variants", "only", "zoo", "equal", "decode_at", "tune", "model.lr", "compile",
        "trainer.max_steps", "trainer.devices", "trainer.strategy", "trainer.precision", "exact", "seeds", "out",
        "resume", "overwrite", "sample", "run", "samples", "temperature", "launcher",
    )  # fmt: skip

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
        if self.decode_at is not None and not (self.decode_at and all(1 <= n <= LONGEST for n in self.decode_at)):
            raise BadInput("decode_at", self.decode_at, f"numbers of tokens, 1 to {LONGEST:,}, as 1024 8192")
        check_options(self)


def parser() -> cli.Parser:
    """The command line: text, net or nets, module, trainer."""
    parser = cli.Parser("gpt.py", (__doc__ or "").split("\n", 1)[0], Options)
    sets = TextSets((datamodules.InMemoryData,), datamodules)
    parser.add_choice("data", sets, "Text", about="the texts")
    net = cli.Classes((nets.Net, nn.Module), nets)
    parser.add_choice("net", net, "GPT", fixed=given_by_data, unless="variants", about="the net, if it is one alone")
    parser.add_variants("variants", net, {}, fixed=given_by_data, about="one more net, to compare")
    parser.add_recipes("zoo", {True: {"variants": zoo_variants()}})
    parser.add_recipes("tune", {...: BY_EPOCHS})
    parser.add_class("model", LitLanguageModel, skip={"net", "tokens_per_character", "compiled", "seed"})
    steps: dict[str, Any] = {"max_epochs": -1, "max_steps": 800}
    steps |= {"val_check_interval": 200, "check_val_every_n_epoch": None}
    fixed = cli.OnResume(why="the learning rate of each step depends on how many there are")
    on_resume = {"max_steps": fixed, "max_epochs": fixed}
    parser.add_trainer(on_resume=on_resume, log_every_n_steps=50, **steps)
    parser.add_texts("search", "of model.lr and model.weight_decay, the values that --tune tries: log(1e-4,1e-2)")
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


class Comparison(Variants):
    """The comparison of `--variants`; jobs find this script by it."""


def check_alone(run: Session) -> None:
    """Raise BadInput for a flag of a comparison where there is one net alone."""
    config = run.config
    for name in ("equal", "decode_at", "tune"):
        if (value := vars(config)[name]) is not None:
            raise BadInput(name, value, "--variants.NAME CLASS beside it, a net to compare")
    for flag, value in config.search.items():
        raise BadInput(f"search.{flag}", value, "--variants.NAME CLASS and --tune N beside it")
    if not issubclass(config.data.target, datamodules.Text):
        raise BadInput("data", config.data.name, "Text, or --variants.NAME CLASS beside it, which takes any texts")


def compare(run: Session) -> None:
    """Train the nets of `--variants` side by side, after a search of their settings if there is one."""
    config = run.config
    if config.search and not config.tune:
        flag, value = next(iter(config.search.items()))
        raise BadInput(f"search.{flag}", value, "--tune N beside it")
    comparison = Comparison(run)
    if is_job():
        comparison.do_job()
        return
    run.announce()
    comparison.check()
    tuning = Tuning(comparison) if config.tune else None
    if tuning:
        tuning.check()
    with run.folder():
        run.describe()
        if tuning:
            comparison.arms = tuning.search()
        comparison.run(tuning.facts() if tuning else None)
        write_language_models(run, comparison.arms, (), {})  # the vocabularies by which the nets write


def main(argv: Sequence[str] | None = None) -> None:
    """Train, or write, as the command line says."""
    with session(NAME, parser(), argv) as run:
        if run.config.sample is not None:
            print(*sample(run.config), sep="\n\n")
            return
        if run.config.variants:
            compare(run)
            return
        check_alone(run)
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
