"""kd.py with students made of the teacher's weights: recorded, the same on ranks and after a resume, wrong options."""

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from experiments import gpt, kd
from harness.runs.nets import load_net, read_spec
from harness.studies.text import language_model
from tests import with_transformers
from tests.commands import results
from tests.deploy import exporting
from tests.experiments.test_mixer_students import TEXT, check_processes_and_a_resume
from tests.language_parts import save_llama

GPT = [
    "--teacher", "GPT", "--teacher.num_layers", "4", "--teacher.num_heads", "2", "--teacher.embed_dim", "8",
]  # fmt: skip


def _flags(folder: Path, *more: str, teacher: list[str] = GPT) -> list[str]:
    (folder / "a.txt").write_text(TEXT)
    return [
        "--data", "Text", "--data.path", str(folder / "a.txt"), "--data.block_size", "8", "--data.batch_size", "6",
        *teacher, "--student", "Pruned", "--student.layers", "2", "--only", "ce", "kd", "--seeds", "1",
        "--trainer.max_epochs", "1", "--trainer.limit_train_batches", "4", *more,
    ]  # fmt: skip


def test_students_begin_with_the_teachers_blocks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kd.main(_flags(tmp_path, "--optimizer.lr", "1e-30", "--out", str(tmp_path / "run")))
    kept = yaml.safe_load((tmp_path / "run" / "seed0" / "student.pruned.yaml").read_text())
    assert len(kept["blocks"]) == 2
    said = capsys.readouterr().out
    assert "Pruned keeps blocks " in said
    assert "its net became" not in said
    teacher = load_net(tmp_path / "run" / "seed0" / "teacher").state_dict()
    for name in ("ce", "kd"):
        student = load_net(tmp_path / "run" / "seed0" / name).state_dict()
        for place, block in enumerate(kept["blocks"]):
            key = "attention.qkv.weight"
            assert torch.equal(student[f"blocks.{place}.{key}"], teacher[f"blocks.{block}.{key}"])
    assert read_spec(tmp_path / "run" / "seed0" / "kd")["class_path"].endswith(".GPT")
    assert results(tmp_path / "run")["students"]["kd"]["test_bpc"][0] > 0


@pytest.mark.slow
def test_processes_and_a_resume_change_nothing(tmp_path: Path) -> None:
    check_processes_and_a_resume(tmp_path, _flags(tmp_path), "kd", "student.pruned.yaml")


@pytest.mark.parametrize(
    ("more", "line"),
    [
        (["--student.layers", "5"], "--student.layers 5: expected 1 to 4 blocks, which the teacher has"),
        (
            ["--student.heads", "1"],
            "--student.heads 1: not allowed with GPT, of which whole blocks are kept or left out",
        ),
    ],
)
def test_wrong_options(more: list[str], line: str, tmp_path: Path, refusal: Any) -> None:
    assert line in refusal(kd.main, *_flags(tmp_path, *more))


def test_a_net_by_itself_is_not_pruned(tmp_path: Path, refusal: Any) -> None:
    by_itself = ["--data", "Text", "--student", "GPT", "--teacher", "Pruned", "--teacher.layers", "1", "--only", "kd"]
    assert "--teacher Pruned: expected a net by itself" in refusal(kd.main, *by_itself)
    assert "--net Pruned: expected a net by itself" in refusal(gpt.main, "--net", "Pruned", "--net.layers", "1")


def _same_logits(folder: Path, atol: float = 1e-5) -> Any:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "hf").eval()
    net, tokens = load_net(folder), torch.arange(3, 11)[None]
    logits = model(tokens).logits[..., : net(tokens).shape[-1]]
    torch.testing.assert_close(logits, net(tokens), rtol=0, atol=atol)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "hf")
    inputs = tokenizer("the", return_tensors="pt", add_special_tokens=False)
    assert model.generate(**inputs, max_new_tokens=4, do_sample=False).shape[1] > inputs["input_ids"].shape[1]
    assert "AutoModelForCausalLM" in (folder / "hf" / "README.md").read_text()
    return tokenizer


FAILING = """from lit_modules.objectives import CrossEntropy, Term
class Fails(CrossEntropy):
    def forward(self, student, teacher, labels):
        ce = super().forward(student, teacher, labels)["ce"]
        return {"ce": Term(ce.values * (float("inf") if self.training else 1), 1.0)}
"""


@pytest.mark.extras("transformers")
@with_transformers.in_fork
def test_students_are_folders_that_transformers_loads(folder: Path) -> None:
    exporting.read_here()
    (folder / "failing.py").write_text(FAILING)
    os.chdir(folder)
    failing = ["--variants.bad", "failing.Fails", "--only", "ce", "kd", "bad"]
    exported = ["--export", str(folder / "exported")]
    kd.main(_flags(folder, *failing, *exported, "--out", str(folder / "failed")))
    assert results(folder / "failed")["students"]["bad"]["failed"][0]
    assert sorted(path.parent.name for path in (folder / "failed" / "seed0").glob("*/hf")) == ["ce", "kd"]
    assert sorted(path.name for path in (folder / "exported").iterdir()) == ["ce", "kd"]
    kd.main(_flags(folder, "--out", str(folder / "run")))
    for name in ("ce", "kd"):
        tokenizer = _same_logits(folder / "run" / "seed0" / name)
        assert tokenizer.decode(tokenizer(TEXT)["input_ids"]) == TEXT
    assert not (folder / "run" / "seed0" / "teacher" / "hf").exists()
    before = (folder / "run" / "seed0" / "kd" / "hf" / "model.safetensors").read_bytes()
    kd.main(["--out", str(folder / "run"), "--resume", "true", "--only", "ce", "kd", "cosine"])
    assert (folder / "run" / "seed0" / "kd" / "hf" / "model.safetensors").read_bytes() == before
    gpt.main(["--sample", "the", "--run", str(folder / "run" / "seed0" / "teacher")])
    gpt.main(["--sample", "the", "--run", str(folder / "run" / "seed0" / "kd")])
    kd.main(_flags(folder, "--out", str(folder / "run"), "--overwrite", "true"))
    assert not list((folder / "run" / "seed0").glob("cosine*"))


@pytest.mark.slow
@pytest.mark.extras("transformers", "peft")
@with_transformers.in_fork
def test_students_of_a_llama_are_too(folder: Path) -> None:
    import transformers

    warnings.simplefilter("ignore")
    save_llama(folder / "lm")
    (folder / "lm" / "generation_config.json").write_text(
        '{"eos_token_id": [2, 0], "temperature": 0.5, "do_sample": true}'
    )
    teacher = ["--teacher", "HuggingFaceLM", "--teacher.name", str(folder / "lm"), "--teacher.pretrained", "true"]
    more = ["--student.heads", "2", "--teacher.dtype", "bfloat16", "--out", str(folder / "run")]
    kd.main(_flags(folder, *more, teacher=teacher))
    tokenizer = _same_logits(folder / "run" / "seed0" / "kd")
    whole = transformers.AutoTokenizer.from_pretrained(folder / "lm")
    assert tokenizer.chat_template == whole.chat_template
    assert tokenizer.get_vocab() == whole.get_vocab()
    config = transformers.GenerationConfig.from_pretrained(folder / "run" / "seed0" / "kd" / "hf")
    assert (config.eos_token_id, config.temperature) == ([2, 0], 0.5)
    with pytest.MonkeyPatch.context() as patch:  # a prompt is not among the tokens that it may write
        patch.setattr(language_model, "WRITTEN", 1)
        gpt.main(["--sample", "the quick brown fox", "--run", str(folder / "lm")])
    for name in ("seed0/teacher", "seed0/kd", "seed0/kd/hf", "../lm"):
        gpt.main(["--sample", "the quick", "--run", str(folder / "run" / name), "--samples", "2"])


@pytest.mark.extras("transformers", "peft")
@with_transformers.in_fork
def test_students_of_adapters_are_too(folder: Path) -> None:
    import peft
    import transformers

    warnings.simplefilter("ignore")
    base = save_llama(folder / "lm")
    name = ["--teacher.name", str(folder / "lm"), "--teacher.pretrained", "true"]
    flags = _flags(folder, teacher=["--teacher", "HuggingFaceLM", *name])
    start = flags.index("--student")
    student = ["--student", "HuggingFaceLM", *(flag.replace("teacher", "student") for flag in name)]
    flags = [*flags[:start], *student, "--student.lora_rank", "2", *flags[start + 4 :], "--optimizer.lr", "0.1"]
    kd.main([*flags, "--exact", "2", "--out", str(folder / "run")])
    _same_logits(folder / "run" / "seed0" / "ce")
    net, tokens = load_net(folder / "run" / "seed0" / "ce"), torch.arange(3, 11)[None]
    trained = {key for key, p in net.named_parameters() if p.requires_grad}
    assert trained
    assert all("lora_" in key for key in trained)
    before = base.state_dict()
    for key, value in net.model.state_dict().items():
        if "lora_" not in key:
            assert torch.equal(value, before[key.replace(".base_layer", "")]), key
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder / "lm").eval()
    assert not torch.allclose(plain(tokens).logits[..., :290], net(tokens)[..., :290], atol=1e-3)
    theirs = peft.PeftModel.from_pretrained(plain, folder / "run" / "seed0" / "ce" / "adapter").eval()
    count = net(tokens).shape[-1]
    torch.testing.assert_close(theirs(input_ids=tokens).logits[..., :count], net(tokens), rtol=0, atol=1e-5)
    adapters = ["--student.layers", "[0,1,3]", "--student.lora_rank", "2", "--out", str(folder / "pruned")]
    kd.main(_flags(folder, *adapters, teacher=["--teacher", "HuggingFaceLM", *name]))
    _same_logits(folder / "pruned" / "seed0" / "ce")
    assert not (folder / "pruned" / "seed0" / "ce" / "adapter").exists()  # of a model that has no name
    net = load_net(folder / "pruned" / "seed0" / "ce")
    assert {"lora_" in key for key, p in net.named_parameters() if p.requires_grad} == {True}
    for key, value in net.model.state_dict().items():
        if "lora_" not in key:
            assert torch.equal(value, before[key.replace(".base_layer", "").replace("layers.2.", "layers.3.")]), key
