"""`--teacher Served`: students learn from a server's log-probabilities as from the stored ones of the same net."""

import re
import shlex
import signal
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from datamodules import Vocabulary
from datamodules.text.vocabulary import Subwords
from experiments import kd
from harness.runs.nets import load_net
from lit_modules.nets import HuggingFaceLM, served
from lit_modules.training.tensor_folder import TensorFolder
from tests import with_transformers
from tests.chats import rows, write_lines
from tests.commands import kill_at, nets, results, start
from tests.experiments.test_kd_stored import STORED, STUDENT, TEACHER
from tests.language import written
from tests.language_parts import VOCABULARY, save_llama
from tests.servers import MODEL, VLLM, serve
from tests.training import assert_same

DOCS = Path(__file__).parents[2] / "docs"


def flags(folder: Path, *more: str) -> list[str]:
    data = ["--data", "Text", "--data.path", str(written(folder)), "--data.block_size", "8", "--data.batch_size", "13"]
    methods = ["--variants.kd.temperature", "1", "--only", "kd", "reverse", "--variants.reverse.class_path"]
    methods += ["ReverseKL", "--variants.reverse.temperature", "1"]
    fit = ["--trainer.max_epochs", "2", "--seeds", "1", "--data.same_blocks", "true"]
    return [*data, *STUDENT, *methods, *fit, *more]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that trains the net behind the server."""
    folder = tmp_path_factory.mktemp("teacher")
    kd.main([*flags(folder), *TEACHER, "--only", "ce", "--out", str(folder / "run")])
    return folder


@pytest.fixture
def server(trained: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[VLLM]:
    monkeypatch.setattr(served, "WAITS", (0.0, 0.0))
    with serve(load_net(trained / "run" / "seed0" / "teacher"), Vocabulary(written(trained).read_text()).decode) as it:
        yield it


def asked(server: VLLM, kept: Path) -> list[str]:
    return ["--teacher", "Served", "--teacher.url", server.url, "--teacher.model", MODEL, *STORED, str(kept)]


def stored(folder: Path) -> dict[int, dict[str, torch.Tensor]]:
    """The tensors of the only folder in this one, of tails those at temperature 1, by the file's number."""
    (path,) = folder.iterdir()
    files = {int(file.stem): TensorFolder.read(_At(path), int(file.stem)) for file in path.glob("*.safetensors")}
    return {number: x | {"tails": x["tails"][:, :1]} for number, x in files.items()}


class _At(TensorFolder):
    def __init__(self, path: Path) -> None:
        self.path = path


@pytest.mark.parametrize("tail", ["bucket", "renormalize"])
def test_students_learn_as_from_what_the_net_itself_stores(
    tail: str, server: VLLM, trained: Path, tmp_path: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(served.KEY, "secret")
    hot = ["--variants.kd.temperature", "3"] if tail == "renormalize" else []
    more = [*hot, "--teacher_tail", tail]
    weights = str(trained / "run" / "seed0" / "teacher" / "weights.pt")
    loaded = [*TEACHER, "--teacher_ckpt", weights, *STORED, str(tmp_path / "loaded")]
    kd.main([*flags(trained, *loaded, *more), "--out", str(tmp_path / "by_net")])
    run = [*flags(trained, *asked(server, tmp_path / "kept"), *more), "--out"]
    kd.main([*run, str(tmp_path / "by_server")])
    theirs, ours = stored(tmp_path / "loaded"), stored(tmp_path / "kept")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(x, theirs[number][name]) for number, of in ours.items() for name, x in of.items())
    assert_same(nets(tmp_path / "by_server", "seed0/[kr]*"), nets(tmp_path / "by_net", "seed0/[kr]*"), atol=0)
    # A text is sent with its last label; the key goes to the server and into no file.
    assert [*map(len, server.asked)] == [len(x["log_p"]) // 8 for _, x in sorted(ours.items())]
    assert {len(text) for texts in server.asked for text in texts} == {9}
    assert {*server.keys} == {"Bearer secret"}
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(b"secret" in path.read_bytes() for path in files)
    assert results(tmp_path / "by_server")["teacher"]["test_loss"] == [None]
    # A later run, or more seeds, need no server.
    requests = len(server.keys)
    capfd.readouterr()
    kd.main([*run, str(tmp_path / "later")])
    kd.main(["--out", str(tmp_path / "by_server"), "--resume", "true", "--seeds", "2"])
    assert capfd.readouterr().out.count("teacher's outputs read from") == 2
    assert len(server.keys) == requests
    assert_same(nets(tmp_path / "later", "seed0/[kr]*"), nets(tmp_path / "by_server", "seed0/[kr]*"), atol=0)


def test_a_busy_server_is_asked_again_and_a_killed_run_goes_on(server: VLLM, trained: Path, tmp_path: Path) -> None:
    exact = flags(trained, "--exact", "4")
    server.faults += [(503, "starts"), (429, "busy")]
    start(tmp_path / "whole", *exact, *asked(server, tmp_path / "one")).check()
    whole = [*server.asked]
    server.asked.clear()
    killed = kill_at(TensorFolder, "write", 2, after=True)
    start(tmp_path / "cut", *exact, *asked(server, tmp_path / "two"), before=killed).check(-signal.SIGKILL)
    start(tmp_path / "cut", "--resume", "true", "--trainer.devices", "2").check()
    assert sorted(server.asked) == sorted(whole)  # each batch once
    ours, theirs = stored(tmp_path / "two"), stored(tmp_path / "one")
    assert all(torch.equal(x, theirs[number][name]) for number, of in ours.items() for name, x in of.items())
    assert_same(nets(tmp_path / "cut", "seed0/[kr]*"), nets(tmp_path / "whole", "seed0/[kr]*"), atol=0)


@pytest.mark.extras("transformers")
@pytest.mark.parametrize("page", ["stored-teacher.md", "how-do-i.md"])
@with_transformers.in_fork
def test_the_command_of_a_page(page: str, folder: Path) -> None:
    warnings.simplefilter("ignore")
    text = (DOCS / page).read_text().replace("\\\n", " ")
    (line,) = (line for line in text.splitlines() if "--teacher Served" in line and line.startswith("python"))
    save_llama(folder / "model", vocab_size=VOCABULARY, max_position_embeddings=128)
    path = write_lines(folder / "chat.jsonl", rows(30))
    tokens = Subwords(str(folder / "model"))
    net = HuggingFaceLM(str(folder / "model"), VOCABULARY, 128, pretrained=True)
    names = {"MODEL": str(folder / "model"), "kept": str(folder / "kept")}
    with serve(net, tokens.decode, names["MODEL"]) as server:
        names["http://HOST:8000/v1"] = server.url
        _, script, *words = shlex.split(line)
        more = ["--data.path", str(path), "--data.max_length", "128", "--trainer.max_epochs", "1", "--seeds", "1"]
        more += ["--student.num_layers", "1", "--student.embed_dim", "8", "--out", str(folder / "run")]
        assert script == "experiments/kd.py"
        kd.main([*(names.get(word, word) for word in words), *more])
    assert results(folder / "run")["students"]["kd"]["test_loss"][0] > 0
    # What is sent ends with a response's end; a prompt's tokens are sent, and not stored.
    sent = sum(len(text) - 1 for texts in server.asked for text in texts)
    assert {text[-1] for texts in server.asked for text in texts} == {2}
    assert 0 < sum(len(x["log_p"]) for x in stored(folder / "kept").values()) < sent


REFUSED: dict[str, tuple[list[str], str]] = {
    "no store": (["--teacher_top_k", "null"], "--teacher Served: expected --teacher_top_k N beside it"),
    "all": (["--teacher_top_k", "all"], "a number of tokens below the vocabulary's"),
    "sample": (["--teacher_tail", "sample", "--only", "kd"], "bucket or renormalize beside --teacher Served"),
    "hot": (["--variants.kd.temperature", "2"], "--variants.kd.temperature 2.0: expected 1, or --teacher_tail renorm"),
    "address": (["--teacher.url", "gpu:8000"], "--teacher.url gpu:8000: expected an address of an API"),
    "key": (["--teacher.url", "http://me:secret@localhost/v1"], "the environment variable VLLM_API_KEY for a key"),
    "model": (["--teacher.model", "other"], f"--teacher.model other: expected a model of .*: {MODEL}"),
    "weights": (["--student", "Pruned", "--student.layers", "1"], "a teacher with weights for a student made of these"),
    "checkpoint": (["--teacher_ckpt", "x.pt"], "not allowed with --teacher Served, which has no weights"),
    "student": (["--student", "Served", "--student.url", "http://a/v1", "--student.model", "b"], "a net that learns"),
    "images": (["--data", "Digits"], "expected"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_settings_that_a_server_cannot_serve(
    case: str, server: VLLM, trained: Path, tmp_path: Path, refusal: Any
) -> None:
    more, line = REFUSED[case]
    given = [*flags(trained), *asked(server, tmp_path / "kept")]
    if "--student" in more:
        del given[given.index("--student") : given.index("--student") + len(STUDENT)]
    message = refusal(kd.main, *given, *more)
    assert re.search(line, message), message
    assert server.asked == []
