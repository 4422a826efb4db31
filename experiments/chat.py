"""A chat in the terminal with a trained language model, or with several side by side.

    python experiments/chat.py --run RUN/seed0/kd
    python experiments/chat.py --run RUN/seed0/ce RUN/seed0/kd

A model is asked in the template of the chats that it has learned. Each goes on with its own answers. Draws depend on
--seed, turn and position alone: the same conversation has the same answers. /reset begins anew; /quit or Ctrl-D ends.
"""

from harness import start

if __name__ == "__main__":
    start.script(OMP_WAIT_POLICY="PASSIVE")

from collections.abc import Sequence

from deploy.chat import Options, chat
from harness import cli
from harness.runs.session import session


def parser() -> cli.Parser:
    """The command line: models, how they draw."""
    return cli.Parser("chat.py", (__doc__ or "").split("\n", 1)[0], Options)


def main(argv: Sequence[str] | None = None) -> None:
    """Chat as the command line describes."""
    with session("chat", parser(), argv) as run:
        run.parser.refuse_idle("nothing is trained or written")
        chat(run.config)


if __name__ == "__main__":
    start.run(main)
