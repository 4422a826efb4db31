"""The bake-off: one teacher, many students, one honest table."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

import datamodules
from apprentice import cli
from apprentice.errors import BadInput
from lit_modules import nets, objectives


@dataclass
class Options(cli.RunOptions):
    """Options of the bake-off.

    Args:
        only: train just these students, as in --only ce kd.
        teacher_ckpt: a trained teacher; it is loaded, not trained.
        teacher_cache_mb: memory for stored teacher outputs; 0 runs the teacher every batch.
    """

    only: list[str] | None = None
    teacher_ckpt: str | None = None
    teacher_cache_mb: int = 1024

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.teacher_cache_mb < 0:
            raise BadInput("teacher_cache_mb", self.teacher_cache_mb, "a number of megabytes, 0 or more")


def parser() -> cli.Parser:
    """What can be chosen: data, nets, distillation methods, optimizer, trainer."""
    parser = cli.Parser("kd.py", __doc__, Options)
    given_by_data = {"input_shape", "num_classes"}
    parser.add_choice("data", datamodules.ImageData, datamodules, "Digits")
    parser.add_choice("teacher", (nets.Net, nn.Module), nets, "DeepNN", skip=given_by_data)
    parser.add_choice("student", (nets.Net, nn.Module), nets, "LightNN", skip=given_by_data)
    variants = {"ce": "CrossEntropy", "kd": "Hinton", "cosine": "Cosine", "hint": "Hint"}
    parser.add_variants("variants", objectives.Objective, objectives, variants)
    parser.add_optimizer()
    parser.add_trainer(max_epochs=10, log_every_n_steps=10)
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Parse and print the configuration."""
    with cli.one_line_errors():
        config = parser().parse(argv)
        print(config)


if __name__ == "__main__":
    main()
