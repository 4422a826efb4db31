"""Knowledge distillation: one teacher, many students, one table.

    python experiments/kd.py                        # Digits, embedded: three seeds in under a minute on 2 cores
    python experiments/kd.py --trainer.devices 8    # the same, up to rounding, from 8 processes
    python experiments/kd.py --out FOLDER --resume true --seeds 5    # go on, or let a finished run grow
    python experiments/kd.py --data Text --teacher GPT --student GPT --only ce kd    # a language model's tokens

For each seed a teacher is trained (or loaded), every student is distilled from it in one pass over the data, and each
is tested once. OUT/ holds the table (results.json, .md, .png), and for each net a TensorBoard run and its weights.
"""

from harness import start

if __name__ == "__main__":
    start.script(OMP_WAIT_POLICY="PASSIVE")  # threads that spin while they wait slow small nets down

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

import datamodules
import strategies
from apprentice.errors import BadInput
from apprentice.weights import load_weights
from harness import config as cli
from harness.runs.session import Session, session
from harness.studies.distillation import check, run_study
from harness.studies.fits import Candidate, learning, make_candidate
from lit_modules import nets, objectives
from lit_modules.classifier import LitClassifier
from lit_modules.distillation import Distillation


@dataclass
class Options(cli.RunOptions):
    """Options of the distillation study.

    Args:
        only: train just these students, as in --only ce kd.
        teacher_ckpt: a trained teacher, loaded, not trained; {seed} in its path is replaced by each seed.
        teacher_cache_mb: memory for stored teacher outputs; 0 runs the teacher every batch.
    """

    only: list[str] | None = None
    teacher_ckpt: str | None = None
    teacher_cache_mb: int = 1024
    grows: ClassVar[Collection[str]] = ("seeds", "only", "trainer.max_epochs")
    fixed: ClassVar[Mapping[str, str]] = {
        "scheduler": "the epochs so far have its rate; with --teacher_ckpt another run learns from the same teachers"
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.teacher_cache_mb < 0:
            raise BadInput("teacher_cache_mb", self.teacher_cache_mb, "a number of megabytes, 0 or more")


def parser() -> cli.Parser:
    """The command line: data, nets, distillation methods, optimizer, trainer."""
    parser = cli.Parser("kd.py", (__doc__ or "").split("\n", 1)[0], Options)
    parser.add_choice("data", (datamodules.InMemoryData, datamodules.ImageData), datamodules, "Digits")
    parser.add_choice("teacher", (nets.Net, nn.Module), nets, "DeepNN", given=("data", "given_to_nets"))
    parser.add_choice("student", (nets.Net, nn.Module), nets, "LightNN", given=("data", "given_to_nets"))
    variants = {"ce": "CrossEntropy", "kd": "Hinton", "cosine": "Cosine", "hint": "Hint"}
    parser.add_variants("variants", (objectives.Objective, objectives.FeatureObjective), objectives, variants)
    parser.add_optimizer()
    parser.add_trainer(strategies.NAMES, max_epochs=10, log_every_n_steps=10)
    return parser


def teacher(run: Session, seed: int) -> tuple[LitClassifier, dict[str, Candidate]]:
    """The teacher's module, loaded if `--teacher_ckpt` is given."""
    candidate = make_candidate(run, "teacher", seed, "CrossEntropy", {}, run.is_double)
    if run.config.teacher_ckpt is not None:
        load_weights(candidate.net, run.config.teacher_ckpt.replace("{seed}", str(seed)), "teacher_ckpt")
    module = LitClassifier(candidate.net, run.data.num_classes, **learning(run.config, run.data), seed=seed)
    return module, {"teacher": candidate}


def students(
    run: Session, seed: int, teacher: nn.Module, names: Sequence[str]
) -> tuple[Distillation, dict[str, Candidate]]:
    """The module of some students of a teacher."""
    config, data, nets_and_objectives, candidates = run.config, run.data, {}, {}
    for name, choice in cli.pick(config.variants, names).items():
        candidates[name] = make_candidate(run, "student", seed, choice.name, choice.init_args, run.is_double)
        nets_and_objectives[name] = candidates[name].net, cli.build(choice, f"variants.{name}")
    module = Distillation(
        teacher, nets_and_objectives, data.input_shape, data.num_classes, seed=seed, **learning(config, data),
        teacher_cache_mb=config.teacher_cache_mb, input_dtype=data.example.dtype,
    )  # fmt: skip
    return module, candidates


def main(argv: Sequence[str] | None = None) -> None:
    """Run the study that the command line describes."""
    with session("kd", parser(), argv) as run:
        run.announce()
        check(run, teacher, students)
        with run.folder():
            run_study(run, teacher, students)


if __name__ == "__main__":
    main()
