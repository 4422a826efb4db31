"""Predictions of a trained net for images or texts of your own, in a table; scores where labels are known.

    python experiments/predict.py --run RUN/seed0/kd --inputs FOLDER --out predictions.csv

The net's folder says how inputs are made (net.yaml), so no data module and no training data are needed. The table has a
line of heads, then one for each input, in the order of their names: the most probable classes with their probabilities.
Inputs that can't be read are listed, and the exit code is 1. Any number of --trainer.devices writes the same bytes.
"""

from harness import start

if __name__ == "__main__":
    start.script(OMP_WAIT_POLICY="PASSIVE")  # threads that spin while they wait slow small nets down

import inspect
from collections.abc import Sequence

from lightning.pytorch import Trainer

from deploy.predict import Options, predict
from harness import cli
from harness.runs.session import session
from harness.runs.training_options import add_trainer

USED = {"accelerator", "devices", "num_nodes", "precision", "strategy", "enable_progress_bar"}  # of the Trainer


def parser() -> cli.Parser:
    """The command line: a net, inputs, a table, the Trainer's devices."""
    parser = cli.Parser("predict.py", (__doc__ or "").split("\n", 1)[0], Options)
    add_trainer(parser, loggers=False, idle=inspect.signature(Trainer).parameters.keys() - USED, logger=False)
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Predict what the command line describes."""
    with session("predict", parser(), argv) as run:
        run.parser.refuse_idle("predictions are made in one pass, by a trained net")
        predict(run)


if __name__ == "__main__":
    start.run(main)
