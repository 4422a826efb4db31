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
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

import datamodules
from apprentice.errors import BadInput
from harness import cli
from harness.cli import GROWS, Limit, at_least, option
from harness.runs.arm_names import NAMES, arm_names
from harness.runs.exactness import DEVICES, settle_exact
from harness.runs.session import Session, session
from harness.runs.training_options import add_trainer
from harness.studies.choices import arguments_set_by_data
from harness.studies.launcher import LAUNCHERS, do_job
from harness.studies.text.equal import Budget
from harness.studies.text.language_model import NAME, sample
from harness.studies.text.one_net import OneNet
from harness.studies.text.sets import TextSets
from harness.studies.text.variants import Variants, zoo_variants
from harness.studies.tuning.options import TuningOptions
from lit_modules import nets
from lit_modules.language_model import LitLanguageModel

LONGEST = 2**20  # tokens in a cache
MOST_SAMPLES = 1000  # a net writes them as one batch
BY_EPOCHS: dict[str, Any] = {  # a search compares settings after epochs
    "trainer.max_steps": -1, "trainer.max_epochs": 6, "trainer.val_check_interval": 1.0,
    "trainer.check_val_every_n_epoch": 1,
}  # fmt: skip


@dataclass
class Options(TuningOptions):
    """Options of the language model."""

    seeds: int | list[int] = option(1, on_resume=GROWS)
    """N repeats everything with the seeds 0 to N - 1; a list, as [42], names them."""
    compile: bool = False
    """let torch.compile make kernels for the net, on one device or under ddp."""
    sample: str | None = option(None, needs={"run": "FOLDER"})
    """a text that the net in --run continues or, where it has learned chats, answers, in their template; of chats also
    a list of messages in JSON, or a file of chats; nothing is trained."""
    run: str | None = option(None, needs={"sample": "PROMPT"}, acts_with="sample")
    """the folder of a finished run, of a net as RUN/seed0/kd, or of a model of transformers."""
    raw: bool = option(False, acts_with="sample")
    """continue the text as it stands, also where the net has learned chats."""
    samples: int = option(1, Limit(
        lambda count: 1 <= count <= MOST_SAMPLES, f"a number of texts, at least 1, at most {MOST_SAMPLES}"
    ), acts_with="sample")  # fmt: skip
    """how many texts to write, after training too."""
    sample_tokens: int | None = option(None, at_least(1, "token"), acts_with="sample")
    """how many tokens to write; default: up to the net's block size, or 128 of a model of others."""
    temperature: float = option(0.8, Limit(lambda value: 0 <= value < float("inf"), "0 or more"), acts_with="sample")
    """divides the logits; 0 takes the likeliest token."""
    top_k: int | None = option(None, Limit(lambda count: count >= 1, "at least 1"), acts_with="sample")
    """draw from so many of the likeliest tokens; from all when not given."""
    sample_seed: int = option(0, acts_with="sample")
    """of the draws."""
    only: list[str] | None = option(None, on_resume=GROWS)
    """of --variants, compare just these."""
    zoo: bool = option(False, on_resume=GROWS)
    """compare a list of GPT's variants, those that can be trained here; the best comes first."""
    equal: Budget | None = None
    """of --variants, scale the width of each to the first one's parameters, or to its operations a token; the number of
    heads stays."""
    decode_at: list[int] | None = option(None, Limit(
        lambda tokens: 1 <= tokens <= LONGEST, f"numbers of tokens, 1 to {LONGEST:,}, as 1024 8192"
    ))  # fmt: skip
    """of --variants, time decoding with so many tokens in the cache, as 1024 8192; nothing by default."""
    tune: int | None = option(None, at_least(2, "settings of each method"))
    """compare the best of N settings, of learning rate and weight decay, of each variant. Training is then of 6 epochs
    in place of 800 steps."""
    idle: ClassVar[Collection[str]] = ("num_classes",)
    common: ClassVar[Collection[str]] = (
        "data", "data.path", "net", "variants", "only", "zoo", "equal", "decode_at", "tune", "model.lr", "compile",
        "trainer.max_steps", "trainer.devices", "trainer.strategy", "trainer.precision", "exact", "seeds", "out",
        "resume", "overwrite", "sample", "run", "samples", "temperature", "launcher",
    )  # fmt: skip


def parser() -> cli.Parser:
    """The command line: text, net or nets, module, trainer."""
    parser = cli.Parser("gpt.py", (__doc__ or "").split("\n", 1)[0], Options)
    sets = TextSets((datamodules.InMemoryData,), datamodules)
    parser.add_choice("data", sets, "Text", about="the texts")
    net = cli.Classes((nets.Net, nn.Module), nets)
    parser.add_choice(
        "net", net, "GPT", fixed=arguments_set_by_data, replaced_by="variants", about="the net, if it is one alone"
    )
    parser.add_variants("variants", net, {}, NAMES, fixed=arguments_set_by_data, about="one more net, to compare")
    parser.add_check(arm_names)
    parser.add_recipes("zoo", lambda _: {True: {"variants": zoo_variants()}})
    parser.add_recipes("tune", {...: BY_EPOCHS})
    not_options = frozenset({"net", "tokens_per_character", "compiled", "seed"})
    parser.add_class("model", cli.options_of(LitLanguageModel, not_options))
    steps: dict[str, Any] = {"max_epochs": -1, "max_steps": 800}
    steps |= {"val_check_interval": 200, "check_val_every_n_epoch": None}
    fixed = cli.OnResume(why="the learning rate of each step depends on how many there are")
    on_resume = {"max_steps": fixed, "max_epochs": fixed}
    add_trainer(parser, on_resume=on_resume, log_every_n_steps=50, **steps)
    parser.add_texts("search", "of model.lr and model.weight_decay, the values that --tune tries: log(1e-4,1e-2)")
    parser.default_experiment("exact", DEVICES, unless=["data", "data.path"])
    parser.add_choice("launcher", LAUNCHERS, on_resume=cli.FREE)
    return parser


class Comparison(Variants):
    """The comparison of `--variants`; jobs find this script by it."""


class Alone(OneNet):
    """The net of `--net`; jobs find this script by it."""


def write(run: Session) -> None:
    """Continue or answer `--sample`; BadInput for a flag of training, which would be ignored."""
    run.parser.refuse_others("sample", "--sample trains nothing, and writes to the terminal")
    print(*sample(run.config), sep="\n\n")


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


def main(argv: Sequence[str] | None = None) -> None:
    """Train, or write, as the command line says."""
    with session(NAME, parser(), argv) as run:
        config = run.config
        if config.sample is not None:
            write(run)
            return
        if config.variants and config.search and not config.tune:
            flag, value = next(iter(config.search.items()))
            raise BadInput(f"search.{flag}", value, "--tune N beside it")
        if not config.variants:
            check_alone(run)
        study = Comparison if config.variants else Alone
        if do_job(run, study):
            return
        run.announce()
        comparison = settle_exact(run, lambda: study(run).prepare())
        with run.folder():
            run.describe()
            comparison.run()
            comparison.kind.finish(run, [], comparison.arms)


if __name__ == "__main__":
    start.run(main)
