"""What all tests share."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # two workers share two cores, and their ranks do too
os.environ.update(KINETO_LOG_LEVEL="99", TORCH_CPP_LOG_LEVEL="ERROR")  # as the scripts set them, see harness/start.py
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # its pool of compilers hangs in a fork of its process

import gc
import importlib
import importlib.util
import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from tests import waiting

LOCKED = ("torchao", "onnx", "onnxruntime", "onnxscript", "safetensors")  # extras of requirements.lock
SHARED = Path(__file__).parents[2] / "shared" / "data"
GPU = "gpu"  # the marker of tests that need one, and the only `-m` that sees it


def pytest_configure(config: pytest.Config) -> None:
    """Hide GPUs from all tests but those of `-m gpu`, before torch looks. Warnings are errors, but for one."""
    waiting.heed_interrupts()
    os.fsync = lambda _: None  # no power fails in a test, and a run waits 70 times for the disk, a third of a second
    if config.option.markexpr != GPU:
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")  # the same tests everywhere
    # Lightning's CombinedLoader still asks torch for a LeafSpec.
    config.addinivalue_line("filterwarnings", "ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Have autograd count devices before a compiler registers more: with threads of its own no fork goes backward.

    Of GPUs it would have threads, too.
    """
    option = session.config.option
    if getattr(option, "dist", "no") == "no" and option.markexpr != GPU:  # xdist's controller runs no test
        import torch

        torch.ones(1, requires_grad=True).sum().backward()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start the files with the most slow tests first, so that two workers end at about the same time."""
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: -slow[item.path])


def pytest_collection_finish(session: pytest.Session) -> None:
    """Keep the collector of garbage off what is imported: each fork would look at, and so copy, all of it."""
    if not session.config.option.collectonly:
        importlib.import_module("sklearn.datasets")  # of Digits: half a second in each fork
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """Let the interpreter end as usual."""
    gc.unfreeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Tell what was not tested for want of GPUs."""
    if skipped := [report for report in terminalreporter.getreports("skipped") if GPU in report.keywords]:
        terminalreporter.write_line(f"gpu: {len(skipped)} tests skipped, as there are too few GPUs here")


@pytest.fixture(autouse=True)
def _gpus(request: pytest.FixtureRequest) -> None:
    """Tests marked `gpu(n)` are skipped where torch sees fewer than n GPUs, one when it is not given.

    They run in forks of this process, which never uses CUDA: see tests/gpus.py.
    """
    if marker := request.node.get_closest_marker(GPU):
        import torch

        wanted = marker.args[0] if marker.args else 1
        if (found := torch.cuda.device_count()) < wanted:
            pytest.skip(f"needs {wanted} GPUs, there are {found}")


@pytest.fixture(scope="session")
def data_root() -> Path:
    """The folder of real data sets: `$APPRENTICE_DATA`, else `../shared/data` beside the checkout."""
    root = Path(os.environ.get("APPRENTICE_DATA") or SHARED)
    if not root.is_dir():
        pytest.skip(f"real data is not at {root}; APPRENTICE_DATA can name another place")
    return root


@pytest.fixture(scope="session", autouse=True)
def _sketched() -> Iterator[None]:
    """Sketch figures, and time few steps, in fixtures of a whole module too."""
    from harness.studies import costs
    from tests import figures

    with figures.sketched(), pytest.MonkeyPatch.context() as patched:
        patched.setattr(costs, "LONGEST", 0.0)
        yield


@pytest.fixture(autouse=True)
def _drawn(request: pytest.FixtureRequest) -> Iterator[None]:
    """Draw the figures of tests marked `drawn`."""
    from tests import figures

    with figures.drawn() if request.node.get_closest_marker("drawn") else nullcontext():
        yield


@pytest.fixture
def refusal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """`refusal(main, *flags)` is the one line with which a command ends that is refused, after "error: "."""
    from tests.commands import refuse

    return lambda main, *flags: refuse(main, flags, tmp_path, capsys)


@pytest.fixture(autouse=True)
def _extras(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests of extras are skipped where their packages are missing; in CI they run into it and fail.

    Those named by a test lie apart, in `$APPRENTICE_EXTRAS`: torchmetrics imports transformers wherever it is there.
    """
    marker = request.node.get_closest_marker("extras")
    if marker is None:
        return
    apart = os.environ.get("APPRENTICE_EXTRAS")
    if marker.args and apart:
        monkeypatch.setattr(sys, "path", [*sys.path, apart])
        monkeypatch.setenv("PYTHONPATH", apart)
    missing = [name for name in marker.args or LOCKED if importlib.util.find_spec(name) is None]
    if missing and not os.environ.get("CI"):
        pytest.skip(f"{', '.join(missing)}: not installed; see CONTRIBUTING.md")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """`tmp_path`, as tests call it that run in a fork: see tests/with_transformers.py."""
    return tmp_path


@pytest.fixture
def one_thread() -> None:
    """A fork that computes with more threads would wait for those that tests before have used here."""
    import torch

    torch.set_num_threads(1)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Where CI has the real data, a test that wants it and is skipped has failed."""
    report = yield
    wants = item.get_closest_marker("real_data") or "data_root" in getattr(item, "fixturenames", ())
    if report.skipped and not hasattr(report, "wasxfail") and wants and os.environ.get("CI") and SHARED.is_dir():
        report.outcome, report.longrepr = "failed", f"skipped, although {SHARED} is there: {report.longrepr}"
    return report
