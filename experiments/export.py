"""A trained net as a folder that runs without this project, with a model card.

    python experiments/export.py --run RUN/seed0/kd --out exported

The folder has model.onnx, model.pt2, weights.safetensors, net.yaml, labels.txt, use.py and README.md, the card. Files
are read again in a fresh process and compared with the net. Needs an extra: pip install --no-build-isolation -e
'.[export]'
"""

from harness import start

if __name__ == "__main__":
    start.script()

from collections.abc import Sequence

from deploy.export import Options, export
from harness import cli
from harness.runs.session import session


def parser() -> cli.Parser:
    """The command line: a net, a folder."""
    return cli.Parser("export.py", (__doc__ or "").split("\n", 1)[0], Options)


def main(argv: Sequence[str] | None = None) -> None:
    """Export what the command line describes."""
    with session("export", parser(), argv) as run:
        run.parser.refuse_idle("nothing is trained")
        export(run.config)


if __name__ == "__main__":
    start.run(main)
