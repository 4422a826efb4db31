"""The README's pictures, of its first command: the display while it runs, and report.html.

    python docs/screenshots.py FOLDER    # from the root; FOLDER gets the run. A minute; needs Debian's chromium

Take them again where the default run's figures change.
"""

import base64
import fcntl
import html
import io
import os
import pty
import struct
import sys
import tempfile
import termios
from pathlib import Path

import pyte
from PIL import Image

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # for `tests`

from tests.browser import Page, browser  # noqa: E402

PICTURES = ROOT / "docs" / "images"
COLUMNS, ROWS = 100, 16
SHOWN = "seed 2 students  epoch 12/20  ━"  # while this is on the screen it is taken, again and again
PAGE = "<body style='margin:0;background:#1e1e1e'><pre style='margin:14px;font:14px/1.25 monospace'>{}</pre></body>"
NAMED = {"default": "#d4d4d4", "magenta": "#d670d6", "cyan": "#29b8db", "green": "#23d18b", "red": "#f14c4c"}


def run_on_terminal(out: str) -> str:
    """Run the command on a terminal; return the chosen screen as HTML."""
    child, terminal = pty.fork()
    if child == 0:
        os.environ |= {"TERM": "xterm-256color", "COLORTERM": "truecolor"}
        os.environ.pop("NO_COLOR", None)
        os.execv(sys.executable, [sys.executable, "experiments/kd.py", "--out", out])
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    screen = pyte.Screen(COLUMNS, ROWS)
    stream, chosen = pyte.ByteStream(screen), ""
    while True:
        try:
            stream.feed(os.read(terminal, 65536))
        except OSError:  # the command has ended
            break
        lines = [line.rstrip() for line in screen.display]
        if any(line.startswith(SHOWN) for line in lines) and any(line.startswith("ttm  ") for line in lines[-5:]):
            chosen = "\n".join(to_html(screen, row) for row in range(ROWS))
    os.waitpid(child, 0)
    if not chosen:
        raise SystemExit(f"the display never showed {SHOWN!r}")
    return chosen


def to_html(screen: pyte.Screen, row: int) -> str:
    """Write a line of the screen with its colours."""
    cells = (screen.buffer[row][column] for column in range(COLUMNS))
    return "".join(
        f"<span style='color:{NAMED.get(cell.fg, '#' + cell.fg)}'>{html.escape(cell.data)}</span>" for cell in cells
    ).rstrip()


def take(page: Page, width: int, top: float, bottom: float, name: str) -> None:
    """Write a strip of the open page as a PNG of few colours."""
    clip = {"x": 0, "y": top, "width": width, "height": bottom - top, "scale": 1}
    png = page.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)["data"]
    Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB").quantize(64).save(PICTURES / name, optimize=True)


def heading(page: Page, text: str) -> float:
    """Return where a heading of the page begins, in pixels from the top."""
    found = f"[...document.querySelectorAll('h2')].find(h => h.textContent.startsWith('{text}'))"
    return float(page.evaluate(f"{found}.getBoundingClientRect().y + scrollY"))


def main() -> None:
    """Take both pictures."""
    (out,) = sys.argv[1:]
    shown = run_on_terminal(out)
    with tempfile.TemporaryDirectory() as temporary:
        display = Path(temporary, "display.html")
        display.write_text(PAGE.format(shown))
        with browser(Path(temporary)) as page:
            page.open(display, 880)
            take(page, 880, 0, 310, "display.png")
            page.open(Path(out, "report.html"), 1000)
            take(page, 1000, heading(page, "Intervals") - 10, heading(page, "Accuracy against"), "report.png")


if __name__ == "__main__":
    main()
