"""Nets that embed texts, end to end: figures recomputed from what a run leaves, vectors, and what is refused."""

import os
import re
import shlex
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
import torch
from torch.nn import functional as F

from datamodules import Pairs
from experiments import kd, predict
from harness.reports.results import Results, load_results
from harness.runs.nets import load_net
from harness.runs.safepoints import SafePoints
from harness.studies.compare import compare, load_runs
from harness.studies.embedding import retrieved_texts
from lit_modules.embedding.ranking import find_corpus, judge_ranks, rank_documents
from tests.chats import write_lines
from tests.commands import kill_at, nets, results, run_of, start
from tests.lit_modules.embedding.test_text_training import Reranker
from tests.texts_in_rows import read_rows, text_rows
from tests.training import assert_same
from tests.with_transformers import in_fork

NETS = [
    "--teacher", "FastText", "--teacher.width", "12", "--teacher.buckets", "256", "--student.width", "8",
    "--student.buckets", "64", "--optimizer.lr", "0.03",
]  # fmt: skip
SIZES = ["--data.batch_size", "7", "--data.test_size", "12", "--data.validation_size", "5"]
FLAGS = ["--data", "Pairs", *SIZES, *NETS, "--trainer.max_epochs", "2"]
finished_default = run_of(kd, "--data", "Pairs", "--trainer.max_epochs", "1", "--seeds", "2")


def refused(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    """The last line with which kd.py ends, after those that the data say, and "error: "."""
    with pytest.raises(SystemExit) as stop:
        kd.main([*flags])
    assert stop.value.code == 2
    *_, line = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    return line.removeprefix("error: ")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_lines(tmp_path_factory.mktemp("texts") / "rows.jsonl", text_rows(40))


@pytest.fixture(scope="module")
def finished(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run") / "run"
    only = ["--only", "untrained", "kl", "rkd", "margin", "--seeds", "2"]
    kd.main([*FLAGS, "--data.path", str(path), *only, "--out", str(out)])
    return out


@torch.no_grad()
def test_figures_are_those_of_the_saved_nets(finished: Path, path: Path) -> None:
    saved, data = results(finished), read_rows(path.parent, text_rows(40))
    assert saved["metric"] == {"name": "test_ndcg", "higher_is_better": True}
    inputs, numbers = data.samples("test", torch.arange(data.sizes["test"]))
    corpus = find_corpus(numbers)
    for name in ("teacher", "untrained", "kl", "rkd", "margin"):
        texts = load_net(finished / "seed1" / name)(inputs)
        flat = texts.flatten(0, 1)
        ranks = rank_documents(flat[corpus.queries], flat[corpus.documents], corpus)
        expected = judge_ranks(ranks, corpus.pairs[:, 0])
        figures = saved["teacher"] if name == "teacher" else saved["students"][name]
        for key, values in expected.items():
            assert figures[f"test_{key}"][1] == pytest.approx(float(values.mean()), abs=1e-9)
        assert np.mean(figures["test_query_ndcg"][1]) == pytest.approx(figures["test_ndcg"][1], abs=1e-5)
        cosines = F.cosine_similarity(texts[:, :1], texts[:, 1:], dim=2)
        in_rows = (cosines[:, 0] < cosines[:, 1]).double()
        assert figures["test_rerank"][1] == pytest.approx(float(1 - in_rows.mean() / 2))
    assert saved["teacher"]["test_ndcg_teacher"] == [None, None]  # its queries are among its own
    assert len(saved["students"]["kl"]["test_query_ndcg"][0]) == len(corpus.queries)


def test_the_page_shows_what_queries_find(finished: Path, path: Path) -> None:
    found = Results.read(load_results(finished))
    (section,) = retrieved_texts.section(found, finished / "seed0", "kl")
    assert section.text.count("| rank | teacher | kl |") == retrieved_texts.SHOWN
    (first, *_), data = retrieved_texts.read_results(finished / "seed0" / "kl"), read_rows(path.parent, text_rows(40))
    assert first.query == data.texts("test", [0])[0][0]


def test_alone_is_as_in_company(finished: Path, path: Path, tmp_path: Path) -> None:
    flags = [*FLAGS, "--data.path", str(path), "--only", "margin", "--seeds", "1", "--out", str(tmp_path / "run")]
    kd.main(flags)
    assert_same(nets(tmp_path / "run", "seed0/margin"), nets(finished, "seed0/margin"))


def test_the_bits_are_the_same_on_one_process_and_on_two(path: Path, tmp_path: Path) -> None:
    for devices in ("1", "2"):
        flags = ["--exact", "4", "--trainer.devices", devices, "--out", str(tmp_path / devices), "--seeds", "1"]
        kd.main([*FLAGS, "--data.path", str(path), "--only", "kl", "margin", "score", *flags])
    assert_same(nets(tmp_path / "1"), nets(tmp_path / "2"))
    one, two = (results(tmp_path / devices)["students"]["kl"]["test_ndcg"] for devices in ("1", "2"))
    assert one == two


def test_a_killed_run_ends_as_a_whole_one(path: Path, finished: Path, tmp_path: Path) -> None:
    out, killed = tmp_path / "run", kill_at(SafePoints, "on_train_batch_start", 9, after=True)
    flags = [*FLAGS, "--data.path", str(path), "--seeds", "1", "--only", "untrained", "kl", "rkd", "margin"]
    start(out, *flags, before=killed).check(-signal.SIGKILL)
    kd.main(["--out", str(out), "--resume", "true"])
    assert_same(nets(out, "seed0/*"), nets(finished, "seed0/*"))


def test_an_index_of_the_teacher_is_searched_by_the_student(path: Path, tmp_path: Path) -> None:
    flags = ["--embed", "teacher", "--only", "untrained", "cosine", "--seeds", "1", "--trainer.max_epochs", "8"]
    kd.main([*FLAGS, "--data.path", str(path), *flags, "--out", str(tmp_path / "run")])
    students = results(tmp_path / "run")["students"]
    among = {name: students[name]["test_ndcg_teacher"][0] for name in students}
    assert among["cosine"] > among["untrained"]
    assert "among the teacher's" in (tmp_path / "run" / "results.md").read_text()


@pytest.mark.parametrize("kind", ["texts", "scores"])
def test_single_texts_and_scored_pairs_need_a_teacher_that_is_loaded(
    kind: str, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = text_rows(40, 2, scored=True)
    if kind == "texts":  # as long as those that the teacher has read
        rows = [{"text": row["positive"]} for row in rows]
    flags = [*FLAGS, "--data.path", str(write_lines(tmp_path / "rows.jsonl", rows)), "--seeds", "1"]
    flags += ["--only", "untrained", "cosine", "--out", str(tmp_path / "run")]
    line = refused(capsys, *flags)
    assert line.startswith("--teacher FastText: expected a teacher that is loaded: Pairs has no answers to queries")
    kd.main([*flags, "--teacher_ckpt", str(finished / "seed0" / "teacher" / "weights.pt")])
    saved = results(tmp_path / "run")
    data = Pairs(tmp_path / "rows.jsonl", batch_size=7, test_size=12, validation_size=5)
    data.setup()
    inputs, _ = data.samples("test", torch.arange(12))
    student = load_net(tmp_path / "run" / "seed0" / "cosine")
    with torch.no_grad():
        texts = student(inputs)
    if kind == "scores":
        human, cosines = data.scores("test"), F.cosine_similarity(texts[:, 0], texts[:, 1], dim=1)
        found = saved["students"]["cosine"]["test_spearman"][0]
        assert found == pytest.approx(scipy.stats.spearmanr(cosines, human).statistic, abs=1e-9)
    else:
        assert saved["metric"]["name"] == "test_neighbours"
        assert saved["teacher"]["test_neighbours"] == [1.0]


def test_runs_are_compared_and_settings_tuned(finished: Path, path: Path, tmp_path: Path) -> None:
    flags = [*FLAGS, "--data.path", str(path), "--only", "untrained", "kl", "--seeds", "2", "--tune", "2"]
    kd.main([*flags, "--out", str(tmp_path / "tuned")])
    rows = {row.name: [*row.differences] for row in compare(load_runs([finished, tmp_path / "tuned"])).rows}
    assert rows["tuned/untrained"] == [0.0, 0.0]
    assert results(tmp_path / "tuned")["tuning"]


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    (tmp_path / "texts.txt").write_text("What of apple 0?\n\nThe river is there. Ö\n")
    return tmp_path / "texts.txt"


@torch.no_grad()
def expected(finished: Path, texts: list[str]) -> np.ndarray:
    rows = [torch.tensor([*text.encode()], dtype=torch.uint8) for text in texts]
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return np.asarray(load_net(finished / "seed0" / "kl")(padded).numpy())


TEXTS = ["What of apple 0?", "The river is there. Ö"]


def test_predict_writes_vectors_of_lines(finished: Path, lines: Path) -> None:
    out = lines.with_name("embeddings.npz")
    predict.main(["--run", str(finished / "seed0" / "kl"), "--inputs", str(lines), "--out", str(out)])
    written = np.load(out)
    assert written["names"].tolist() == ["texts.txt:1", "texts.txt:3"]
    np.testing.assert_allclose(written["embeddings"], expected(finished, TEXTS), atol=1e-6)


@pytest.mark.extras("datasets")
def test_predict_writes_parquet(finished: Path, lines: Path) -> None:
    from pyarrow import parquet

    out = lines.with_name("embeddings.parquet")
    predict.main(["--run", str(finished / "seed0" / "kl"), "--inputs", str(lines), "--out", str(out)])
    table = parquet.read_table(out).to_pydict()
    assert table["text"] == TEXTS
    np.testing.assert_allclose(np.array(table["embedding"]), expected(finished, TEXTS), atol=1e-6)


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--only", "kd", "--variants.kd", "Hinton"], "--variants.kd Hinton: expected a method that compares scores"),
        (["--zoo", "true"], "--zoo true: not allowed with --data Pairs"),
        (["--metric", "f1"], "--metric f1: not allowed with --data Pairs, judged by nDCG@10"),
        (["--only", "queue", "--variants.queue", "SimilarityKL", "--variants.queue.queue", "9000"],
         "--variants.queue.queue 9000: expected fewer than the"),
        (["--variants.tokens", "TokenMatch"], "--variants.tokens TokenMatch: expected a method that compares scores"),
        (["--data.labelled", "5"], "--data.labelled 5: not allowed: students see no label"),
    ],
)  # fmt: skip
def test_what_can_not_be_used_is_one_line(
    flags: list[str], line: str, path: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    assert refused(capsys, *FLAGS, "--data.path", str(path), *flags, "--out", str(out)).startswith(line)
    assert not out.exists()


def test_methods_of_candidates_need_them(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    rows: Callable[[int], Path] = lambda k: write_lines(tmp_path / f"{k}.jsonl", text_rows(40, k))  # noqa: E731
    flags = [*FLAGS, "--data.path", str(rows(2)), "--out", str(tmp_path / "run"), "--only"]
    for name, method in (("margin", "MarginMSE"), ("score", "ScoreKL")):
        line = refused(capsys, *flags, name)
        assert line.startswith(f"--variants.{name} {method}: expected rows with at least 2 candidates")
    longest = max(len(str(text)) for row in text_rows(40, 2) for text in row.values())
    reranker = ["--student", f"{Reranker.__module__}.Reranker", "--student.length", str(longest)]
    flags = ["--data", "Pairs", *SIZES, *NETS[:6], *reranker, *flags[len(FLAGS) :], "untrained"]
    assert "of rows without negatives there is one text to score" in refused(capsys, *flags)
    scored = text_rows(40, 2, scored=True)
    scored[3]["score"] = float("nan")
    line = refused(capsys, *FLAGS, "--data.path", str(write_lines(tmp_path / "nan.jsonl", scored)))
    assert "a number in score" in line


def test_without_flags_a_teacher_learns_from_answers(finished_default: Path) -> None:
    saved = results(finished_default)
    assert saved["config"]["recipe"] == "pairs"
    assert [*saved["students"]] == ["cosine", "untrained", "mse", "kl", "rkd"]
    assert min(saved["teacher"]["test_ndcg"]) > max(saved["students"]["untrained"]["test_ndcg"])


@pytest.mark.extras("transformers")
@in_fork
def test_the_page_of_minilm_runs_as_printed(tmp_path: Path) -> None:
    from tests.encoder_parts import save_encoder

    page = (Path(__file__).parents[2] / "docs" / "measurements" / "embeddings.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    (command,) = (line for line in page.replace("\\\n", " ").splitlines() if "MINILM" in line and "kd.py" in line)
    table = tmp_path / "orangecontrib" / "text" / "datasets" / "20newsgroups-train.tab"
    table.parent.mkdir(parents=True)
    posts = [" ".join(f"wall{i} bird" for _ in range(16)) for i in range(24)]
    table.write_text("\n".join(["head"] * 3 + [f"rec.birds\t{post} river" for post in posts]))
    os.chdir(tmp_path)
    sys.path.insert(0, str(tmp_path))
    exec(compile(code, "rows.py", "exec"), {})
    assert len(Path("posts.jsonl").read_text().splitlines()) == 24
    assert len(Path("python.jsonl").read_text().splitlines()) > 600
    save_encoder(tmp_path / "MINILM")
    shorter = ["--data.validation_size", "4", "--data.test_size", "20", "--data.batch_size", "8", "--seeds", "1"]
    kd.main([*shlex.split(command)[2:], *shorter, "--out", "run"])
    assert {"three-cosine", "two-untrained"} <= {*results(Path("run"))["students"]}
    assert "Δ to untrained, points" in Path("run", "results.md").read_text()
