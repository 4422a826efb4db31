"""GGUF files as teachers: the bits of transformers' own loader, one conversion, damaged files in one line."""

import os
import warnings
from pathlib import Path

import pytest
import torch

from apprentice.gguf import model_folder
from datamodules import Subwords
from experiments import kd
from harness.runs.nets import load_net
from lit_modules.nets import HuggingFaceLM
from tests.commands import bad_input, results
from tests.language_parts import WORDS, save_gguf, save_llama, save_tokenizer
from tests.processes import Run

pytestmark = pytest.mark.extras("transformers", "gguf")


@pytest.mark.parametrize("what", ["library", pytest.param("command", marks=pytest.mark.slow)])
def test_a_gguf_file_is_a_teacher(what: str, tmp_path: Path) -> None:
    checks = {"library": _as_the_library, "command": _distil}
    run = Run(checks[what], tmp_path, log=tmp_path / "log")
    assert run.wait() == 0, run.output


def _save(folder: Path) -> Path:
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    warnings.simplefilter("ignore")
    model = save_llama(folder / "hf")
    (folder / "gguf").mkdir()
    file = folder / "gguf" / "tiny.gguf"
    save_gguf(model, save_tokenizer(folder / "hf"), file)
    return file


def _as_the_library(folder: Path) -> None:
    import transformers

    file = _save(folder)
    converted = model_folder(str(file.parent))
    assert converted.startswith(str(folder / "cache"))
    assert model_folder(str(file)) == converted
    time = (Path(converted) / "model.safetensors").stat().st_mtime_ns
    theirs = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name).eval()
    original = transformers.AutoModelForCausalLM.from_pretrained(folder / "hf").eval()
    tokens = torch.arange(3, 19).view(2, 8)
    ours = HuggingFaceLM(str(file), 290, 8, pretrained=True).eval()
    assert torch.equal(ours(tokens), theirs(tokens).logits[..., :290])
    torch.testing.assert_close(ours(tokens), original(tokens).logits[..., :290])
    assert (Path(converted) / "model.safetensors").stat().st_mtime_ns == time
    words, known = Subwords(str(file.parent)), Subwords(str(folder / "hf"))
    assert words.same_as(known)
    assert words.encode(WORDS + "ü").tolist() == known.encode(WORDS + "ü").tolist()
    template = transformers.AutoTokenizer.from_pretrained(converted).chat_template
    assert template == transformers.AutoTokenizer.from_pretrained(folder / "hf").chat_template

    cut = file.with_name("cut.gguf")
    cut.write_bytes(file.read_bytes()[:9000])
    assert bad_input(HuggingFaceLM, str(cut), 290, 8).startswith(f"name {cut}: expected a GGUF file of a language mod")
    assert bad_input(HuggingFaceLM, str(file.parent), 290, 8) == (
        f"name {file.parent}: expected one of its GGUF files, such as {cut}"
    )
    cut.write_bytes(b"no such thing")
    assert bad_input(Subwords, str(cut)) == (
        f"data.tokenizer {cut}: expected a GGUF file; this one does not begin as one"
    )
    cut.unlink()
    assert bad_input(HuggingFaceLM, str(cut), 290, 8) == f"name {cut}: expected a GGUF file; there is none"
    assert [path.name for path in (folder / "cache" / "apprentice" / "gguf").iterdir()] == [Path(converted).name]


def _distil(folder: Path) -> None:
    file = _save(folder)
    (folder / "a.txt").write_text(WORDS * 60)
    kd.main([
        "--data", "Text", "--data.path", str(folder / "a.txt"), "--data.block_size", "8", "--only", "kd",
        "--teacher", "HuggingFaceLM", "--teacher.name", str(file), "--teacher.pretrained", "true",
        "--student", "GPT", "--student.num_layers", "1", "--student.num_heads", "1", "--student.embed_dim", "8",
        "--seeds", "1", "--trainer.max_epochs", "1", "--trainer.limit_train_batches", "2", "--out", str(folder / "run"),
    ])  # fmt: skip
    assert results(folder / "run")["teacher"]["nets"] == 1
    original = HuggingFaceLM(str(folder / "hf"), 290, 8, pretrained=True).state_dict()
    teacher = load_net(folder / "run" / "seed0" / "teacher").state_dict()
    assert all(torch.equal(value, original[key]) for key, value in teacher.items())
