"""gpt.py, end to end: what it leaves, how it goes on, what it writes, and what it refuses."""

import html
import json
import math
import shutil
import signal
from functools import partialmethod
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from datamodules import Text
from experiments import gpt
from harness.runs.nets import load_net
from harness.runs.safepoints import SafePoints
from harness.studies.compare.runs import EXPERIMENTS, load_run
from lit_modules.tasks import BITS, TokenScores
from tests import figures
from tests.commands import Refusal, kill_at, lasting, left_by_overwriting, nets, results, start
from tests.grids import mostly_slow
from tests.language import written
from tests.training import assert_same

NET = ["--net.num_layers", "2", "--net.num_heads", "2", "--net.embed_dim", "16", "--net.dropout", "0.1"]
STEPS = ["--trainer.max_steps", "12", "--trainer.val_check_interval", "4", "--trainer.log_every_n_steps", "1"]
QUICK = [*NET, *STEPS, "--data.block_size", "16", "--model.warmup_steps", "3"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpt")
    flags = ["--data.path", str(written(folder)), "--seeds", "2", "--samples", "2", "--out", str(folder / "run")]
    with figures.drawn():
        gpt.main([*QUICK, *flags])
    return folder / "run"


def test_compare_reads_a_net_alone_as_before(finished: Path) -> None:
    run = load_run(finished, finished, "run")
    assert (run.experiment, run.baseline) == (EXPERIMENTS["gpt"], "run/gpt")
    assert run.entries["gpt"].scores["test_bpc"] == results(finished)["students"]["gpt"]["test_bpc"]


def samples(run: Path, seed: int) -> list[str]:
    """What the net of a seed has written."""
    texts: list[str] = json.loads((run / f"seed{seed}" / "gpt" / "samples.json").read_text())
    return texts


def test_a_run_leaves_what_is_needed(finished: Path, tmp_path: Path) -> None:
    found = results(finished)
    assert (found["experiment"], found["seeds"]) == ("gpt", [0, 1])
    assert found["data"] == {"name": "Text", "train": 405, "validation": 44, "test": 49}
    data = Text(finished.parent / "text", 16)
    data.setup()
    facts = found["students"]["gpt"]
    for seed in (0, 1):
        scores, net = TokenScores(), load_net(finished / f"seed{seed}" / "gpt")
        for batch in data.test_dataloader():
            scores.update(net(batch.inputs), batch.labels)
        expected = {f"test_{name}": value.item() for name, value in scores.compute().items()}
        record = json.loads((finished / f"seed{seed}" / "gpt.json").read_text())["nets"]["gpt"]
        assert {name: record[name] for name in expected} == pytest.approx(expected, rel=1e-5)
        assert [facts[name][seed] for name in BITS.tested] == [record[name] for name in BITS.tested]
        assert facts["parameters"] == sum(p.numel() for p in net.parameters())
        assert min(found["students_fit_seconds"][seed], facts["step_ms"], facts["train_flops"]) > 0
        assert [len(text) for text in samples(finished, seed)] == [16, 16]
    for name in ("config.yaml", "environment.json", "results.md", "seed1/gpt/weights.pt", "seed1/gpt/vocabulary.json"):
        assert (finished / name).stat().st_size > 0
    told = (finished / "results.md").read_text()
    assert told.startswith("# gpt on Text\n\n- Data: Text: 405 train, 44 validation, 49 test tokens\n- Seeds: 0, 1\n")
    assert "net GPT(num_layers=2, num_heads=2" in told
    assert "trainer.max_steps 12" in told
    first = html.escape(samples(finished, 0)[0].split("\n")[0], quote=False)
    assert first in (finished / "report.html").read_text()
    assert not left_by_overwriting(finished, tmp_path)


@pytest.mark.slow
def test_seeds_as_jobs_give_the_bits_of_one_process(
    finished: Path, tmp_path: Path, refusal: Refusal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", str(Path(gpt.__file__).parents[1]))
    out, flags = tmp_path / "run", ["--data.path", str(finished.parent / "text"), "--seeds", "2", "--samples", "2"]
    gpt.main([*QUICK, *flags, "--launcher", "local", "--launcher.jobs", "2", "--out", str(out)])
    for seed in (0, 1):
        assert (out / "jobs" / f"seed{seed}-gpt.log").exists()
        weights = [root / f"seed{seed}" / "gpt" / "weights.pt" for root in (out, finished)]
        assert weights[0].read_bytes() == weights[1].read_bytes()
    assert [samples(out, seed) for seed in (0, 1)] == [samples(finished, seed) for seed in (0, 1)]
    line = refusal(gpt.main, *QUICK, *flags, "--launcher", "local", "--launcher.students", "1")
    assert line == "--launcher.students 1: not allowed, as a seed has one net"


def test_bytes_are_tokens_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = tmp_path / "text", tmp_path / "run"
    path.write_text("naïve €uro 漢字 " * 60)
    gpt.main([*QUICK, "--data.vocabulary", "bytes", "--data.path", str(path), "--out", str(out)])
    scores = results(out)["students"]["gpt"]
    data = Text(path, 16, "bytes")
    data.setup()
    (bits,), (loss,) = scores["test_bpc"], scores["test_loss"]
    assert bits == pytest.approx(loss / math.log(2) * data.tokens_per_character["test"])
    assert data.tokens_per_character["test"] > 1.4
    capsys.readouterr()
    gpt.main(["--sample", "€ ∂", "--run", str(out)])
    assert capsys.readouterr().out.startswith("€ ∂")


def test_curves_and_texts_are_in_tensorboard(finished: Path) -> None:
    events = EventAccumulator(str(finished / "seed0" / "gpt"), size_guidance={"scalars": 0})
    events.Reload()
    tags = events.Tags()
    assert {"train/loss", "train/bpc", "val/loss", "val/bpc", "val/perplexity", "test/loss"} <= set(tags["scalars"])
    assert [event.step for event in events.Scalars("train/loss")] == list(range(12))
    assert [event.step for event in events.Scalars("val/loss")] == [3, 7, 11]
    assert "sample/text_summary" in tags["tensors"]


def test_a_finished_run_goes_on_from_prompts(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def told(*flags: str) -> str:
        capsys.readouterr()
        gpt.main(["--sample", "the ", "--run", str(finished), *flags])
        return capsys.readouterr().out

    text = told()
    assert text.startswith("the ")
    assert len(text) == 17
    assert told() == text != told("--sample_seed", "1")
    assert told("--temperature", "0", "--samples", "3") == "\n\n".join([told("--temperature", "0")[:-1]] * 3) + "\n"
    assert told("--top_k", "1") == told("--temperature", "0")
    gpt.main(["--sample", "a" * 16, "--run", str(finished)])
    assert capsys.readouterr().out == "a" * 16 + "\n"


def test_what_was_trained_with_a_gpus_kernel_writes_here(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Path(shutil.copytree(finished, tmp_path / "run"))
    told = run / "seed0" / "gpt" / "net.yaml"
    told.write_text(told.read_text().replace("backend: auto", "backend: cudnn"))
    assert load_net(told.parent).blocks[0].attention.backend == "cudnn"
    capsys.readouterr()
    for folder in (finished, run):
        gpt.main(["--sample", "the ", "--run", str(folder)])
    told_by = capsys.readouterr().out.splitlines()
    assert told_by[: len(told_by) // 2] == told_by[len(told_by) // 2 :]


@pytest.mark.parametrize("prompt", ["ROMEO:", "# a comment", "&x", "5", " spaced ", "a\nb", "[1, 2]", "", "true"])
def test_a_prompt_is_taken_as_it_stands(prompt: str) -> None:
    assert gpt.parser().parse(["--sample", prompt, "--run", "x"]).sample == prompt


def test_help_tells_what_can_be_set(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpt.parser().parse(["--help", "all"])
    told = " ".join(capsys.readouterr().out.split())
    for line in (
        "data: Chat, Copying, Needle, Recall, Text, or the import path of a class: --data Text",
        "--data.block_size 64 T, tokens of a sample",
        "net: EncoderDecoder, Ensemble, GPT, HuggingFace,", "--net.attention_dropout 0.0",
        "--model.lr 0.003 the highest learning rate", "--trainer.max_steps 800",
    ):  # fmt: skip
        assert line in told


@pytest.mark.parametrize(("prompt", "said"), [
    ("Q∂ é", "unknown: 'Q' 'é' '∂'"), ("", "expected 1 to 16 tokens"), ("a" * 17, "not 17"),
])  # fmt: skip
def test_a_prompt_that_the_net_cannot_take(prompt: str, said: str, finished: Path, refusal: Refusal) -> None:
    line = refusal(gpt.main, "--sample", prompt, "--run", finished)
    assert line.startswith(f"--sample '{prompt}': ")
    assert said in line


def test_a_run_of_another_experiment_has_no_net_that_writes(tmp_path: Path, refusal: Refusal) -> None:
    (tmp_path / "results.json").write_text(json.dumps({"experiment": "comm", "format": 1}))
    expected = f"--run {tmp_path}: expected a run of gpt.py; this one is of comm.py"
    assert refusal(gpt.main, "--sample", "a", "--run", tmp_path).startswith(expected)


def test_a_rate_too_high_is_named(tmp_path: Path, refusal: Refusal) -> None:
    flags = [*QUICK, "--data.path", written(tmp_path), "--model.lr", "1e30", "--model.clip_norm", "0"]
    line = refusal(gpt.main, *flags, "--out", tmp_path / "run")
    assert line.startswith("--model.lr 1e+30: expected settings that train the net; with seed 0")


@pytest.mark.parametrize("devices", mostly_slow(["1", "2"], "1"))
def test_killed_and_resumed_it_ends_the_same(devices: str, tmp_path: Path) -> None:
    flags = [*QUICK, "--data.path", str(written(tmp_path)), "--trainer.devices", devices, "--checkpoint_every", "1e-9"]
    whole, run = tmp_path / "whole", tmp_path / "run"
    output = start(whole, *flags, main=gpt.main).check()
    assert [f"step {step}/12" in output for step in (4, 8, 12)] == [True] * 3
    killed = kill_at(SafePoints, "on_train_batch_start", 7, after=True)
    start(run, *flags, before=killed, main=gpt.main).check(-signal.SIGKILL)
    start(run, *flags, "--resume", "true", main=gpt.main).check()
    assert_same(nets(run), nets(whole))
    assert lasting(results(run)) == lasting(results(whole))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's own looking
def test_compiled_on_two_processes_it_ends_as_eager_on_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend="aot_eager"))
    flags, runs = [*QUICK, "--data.path", str(written(tmp_path))], [tmp_path / "1", tmp_path / "2"]
    for out, compiled in zip(runs, ("false", "true"), strict=True):
        start(out, *flags, "--trainer.devices", out.name, "--compile", compiled, main=gpt.main).check()
    assert_same(*map(nets, runs), atol=1e-4)
    losses = [results(out)["students"]["gpt"]["test_loss"][0] for out in runs]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


@pytest.mark.real_data
@pytest.mark.slow
def test_a_short_run_on_tiny_shakespeare(data_root: Path, tmp_path: Path) -> None:
    path = data_root / "tinyshakespeare" / "input.txt"
    gpt.main(["--data.path", str(path), "--trainer.max_steps", "150", "--out", str(tmp_path / "run")])
    assert results(tmp_path / "run")["students"]["gpt"]["test_loss"][0] < 2.6
