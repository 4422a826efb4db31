"""A teacher of texts that runs once: its file is the same whoever writes it, and read as if the teacher had run."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from apprentice.batch import IGNORED, Batch
from apprentice.errors import BadInput
from apprentice.keyed import with_seed
from datamodules import Chat, Text
from lit_modules.distillation import Distillation
from lit_modules.nets import Ensemble, Outputs
from lit_modules.nets.outputs import TopTokens
from lit_modules.nets.stored import StoredTeacher
from lit_modules.objectives import Cosine, CrossEntropy, Hinton, JensenShannon, Objective, ReverseKL, Sum
from lit_modules.tasks import Tokens
from lit_modules.text.stored_teacher import Form, Stored, TextStore, read_texts
from tests.chats import chat
from tests.language import gpt, text
from tests.training import assert_same, fit, on, weights

METHODS: dict[str, Callable[[], Objective]] = {
    "kd": Hinton,
    "reverse": ReverseKL,
    "js": JensenShannon,
    "ce": CrossEntropy,
}
SMALL = {"num_layers": 1, "embed_dim": 8}


def distil(
    data: Text | Chat,
    folder: Path,
    stored: Stored | None = None,
    methods: Any = METHODS,
    teacher: nn.Module | None = None,
    chunk: int = 0,
) -> Distillation:
    students = {name: (gpt(**data.net_arguments, **SMALL), make()) for name, make in methods.items()}
    return Distillation(
        teacher or gpt(**data.net_arguments, seed=1), students, data.input_shape, data.num_classes, task=Tokens(),
        input_dtype=torch.int64, stored=stored, teacher_cache_dir=folder, teacher_cache_mb=0,
        loss_chunk=chunk,
    )  # fmt: skip


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[dict[str, Tensor], list[int]]]:
    """Train by what is stored in a folder; return the weights, and the texts that the teacher got each time."""
    asked: list[int] = []
    ask = Distillation.ask_teacher

    def counted(self: Distillation, inputs: Tensor, *purpose: Any) -> Outputs:
        asked.append(len(inputs))
        return ask(self, inputs, *purpose)

    def trained(place: str = "auto 1", stored: Stored | None = None, folder: str = "kept", **options: Any) -> Any:
        asked.clear()
        data = text(tmp_path, same_blocks=True, block_size=16)
        return weights(fit(distil(data, tmp_path / folder, stored, **options), data, **on(place))), [*asked]

    monkeypatch.setattr(Distillation, "ask_teacher", counted)
    return trained


def kept_in(folder: Path) -> Path:
    (only,) = folder.iterdir()
    return only


def contents(folder: Path) -> dict[str, bytes]:
    """Of each file of the only folder in this one."""
    return {path.name: path.read_bytes() for path in kept_in(folder).iterdir()}


def stand_in(tmp_path: Path, stored: Stored, methods: Any = METHODS) -> StoredTeacher:
    data = text(tmp_path, same_blocks=True, block_size=16)
    cache = distil(data, tmp_path, stored, methods).cache
    assert isinstance(cache, TextStore)
    return StoredTeacher(data.num_classes, str(cache.source))


def test_all_tokens_give_the_bits_of_a_teacher_that_runs(run: Any, tmp_path: Path, capfd: Any) -> None:
    online, always = run()
    assert always == [13, 13, 2] * 2
    kept, once = run(stored=Stored("all"))
    assert once == [13, 13, 2]
    assert f"teacher's outputs kept in {kept_in(tmp_path / 'kept')}: 448 tokens, all tokens" in capfd.readouterr().out
    read, never = run(stored=Stored("all"), teacher=stand_in(tmp_path, Stored("all")))
    assert never == []
    assert f"teacher's outputs read from {kept_in(tmp_path / 'kept')}" in capfd.readouterr().out
    assert_same(online, kept)
    assert_same(online, read)


@pytest.mark.parametrize("tail", ["bucket", "renormalize", "sample"])
def test_a_file_is_read_without_the_teacher(tail: Any, run: Any, tmp_path: Path) -> None:
    stored = Stored(5, tail)
    methods = {"kd": Hinton} if tail == "sample" else METHODS
    kept, _ = run(stored=stored, methods=methods)
    read, asked = run(stored=stored, methods=methods, teacher=stand_in(tmp_path, stored, methods))
    assert asked == []
    assert_same(kept, read)


@pytest.mark.slow
@pytest.mark.parametrize("top_k", ["all", 5])
def test_any_number_of_ranks_writes_and_reads_the_same(top_k: Any, run: Any, tmp_path: Path) -> None:
    stored, one = Stored(top_k), None
    for number in (1, 2, 3):
        found, _ = run(f"ddp {number} exact 4", stored, f"kept{number}")
        assert contents(tmp_path / f"kept{number}") == contents(tmp_path / "kept1")
        read, _ = run(f"ddp {number} exact 4", stored, "kept1", teacher=stand_in(tmp_path, stored))
        one = one or found
        assert_same(one, found)
        assert_same(one, read)


def test_a_stopped_run_leaves_blocks_that_the_next_one_keeps(run: Any, tmp_path: Path, monkeypatch: Any) -> None:
    run(stored=Stored(5), folder="whole")
    ask = Distillation.ask_teacher

    def killed(self: Distillation, inputs: Tensor, *purpose: Any) -> Outputs:
        if len(inputs) < 13:
            raise SystemExit(9)
        return ask(self, inputs, *purpose)

    with monkeypatch.context() as patch:
        patch.setattr(Distillation, "ask_teacher", killed)
        with pytest.raises(SystemExit):
            run(stored=Stored(5), folder="part")
    part, whole = kept_in(tmp_path / "part"), contents(tmp_path / "whole")
    assert {path.name for path in part.iterdir()} == {".lock", "0.safetensors", "13.safetensors"}
    _, asked = run(stored=Stored(5), folder="part")
    assert asked == [2]
    assert contents(tmp_path / "part") == whole
    # A machine that went down may have written a part of a file.
    (part / "facts.json").unlink()
    (part / "26.safetensors").unlink()
    (part / "13.safetensors").write_bytes(whole["13.safetensors"][:-1300] + bytes(1300))
    (part / "14.safetensors").write_bytes(b"of a run with other batches")
    _, asked = run(stored=Stored(5), folder="part")
    assert asked == [13, 2]
    assert contents(tmp_path / "part") == whole


def test_a_changed_file_is_refused(run: Any, tmp_path: Path) -> None:
    stored = Stored(5)
    run(stored=stored)
    folder, teacher = kept_in(tmp_path / "kept"), stand_in(tmp_path, stored)

    def refused(name: str, content: bytes, line: str) -> None:
        path = folder / name
        whole = path.read_bytes()
        path.write_bytes(content or whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:])
        with pytest.raises(BadInput, match=f"^teacher_cache_dir {path}: {line}"):
            run(stored=stored, teacher=teacher)
        path.write_bytes(whole)

    first = (folder / "0.safetensors").read_bytes()
    refused("13.safetensors", b"", "expected a file whose tensors have its checksum; it is damaged: delete it")
    refused("13.safetensors", first[:-1], "expected a whole file of tensors; it is damaged")
    refused("13.safetensors", b"PK" + first[2:], "expected a whole file of tensors; it is damaged")
    refused("26.safetensors", first, "expected entries of 32 tokens; it has others: delete it")
    refused("facts.json", b"{", "expected a page of facts; it is damaged")
    facts = json.loads((folder / "facts.json").read_text())
    refused("facts.json", json.dumps(facts | {"format": 7}).encode(), "expected facts of .* their format is 7")
    (folder / "facts.json").write_text(json.dumps(facts | {"weights": "0"}))
    with pytest.raises(BadInput, match="expected facts of this teacher and this data; their weights is 0"):
        run(stored=stored)
    shutil.rmtree(folder)
    with pytest.raises(BadInput, match="they are gone"):
        run(stored=stored, teacher=teacher)


def test_files_of_older_versions_are_written_again(run: Any, tmp_path: Path, capfd: Any) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / f"teacher-{'0' * 32}.topk").write_bytes(b"")
    run(stored=Stored(5))
    line = f"{tmp_path / 'kept'} has files made by an older version; what this run needs is written again"
    assert line in capfd.readouterr().out
    run(stored=Stored(5))
    assert line not in capfd.readouterr().out


def test_methods_that_need_more_are_refused(tmp_path: Path) -> None:
    data = text(tmp_path, same_blocks=True)

    def refused(line: str, stored: Stored, make: Callable[[], Objective], **options: Any) -> None:
        with pytest.raises(BadInput, match=line):
            distil(data, options.pop("folder", tmp_path), stored, {"it": make}, **options)

    refused("a method of probabilities alone .* reads the layer", Stored("all"), Cosine)
    refused("`teacher_tail bucket` or `teacher_tail renormalize` for this", Stored(5, "sample"), ReverseKL)
    refused("`teacher_top_k all` beside it", Stored(5), lambda: Hinton(standardize=True))
    refused("can't learn from 5 tokens, sample", Stored(5, "sample"), lambda: Sum([Hinton(), JensenShannon()]))
    refused("`teacher_cache_dir DIR`", Stored(5), Hinton, folder=None)
    members = Ensemble([gpt(**data.net_arguments), gpt(**data.net_arguments, seed=1)])
    refused("are the mean of several", Stored(5), Hinton, teacher=members)
    refused("what was stored of it beside it", None, Hinton, teacher=StoredTeacher(data.num_classes, ""))  # type: ignore[arg-type]
    for wrong in ({"top_k": 0}, {"top_k": "some"}, {"top_k": 5, "tail": "cut"}):
        with pytest.raises(BadInput, match="teacher_t"):
            Stored(**wrong)  # type: ignore[arg-type]
    moving = text(tmp_path)
    with pytest.raises(BadInput, match="texts that are the same in each epoch"):
        fit(distil(moving, tmp_path, Stored(5)), moving)


V, T, N = 40, 3, 4


def logits(seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return with_seed(seed, lambda: 3 * torch.randn(N, T, V, dtype=dtype))


def stored_as(form: Form, z_t: Tensor, first: int = 0) -> Outputs:
    everything = torch.ones(N, T, dtype=torch.bool)
    return form.expand(form.reduce(z_t.flatten(0, 1), first), everything)


def gradient(objective: Objective, z_s: Tensor, teacher: Outputs) -> Tensor:
    z_s = z_s.clone().requires_grad_()
    terms = objective(Outputs(z_s, {}), teacher, torch.zeros(N, T, dtype=torch.int64))
    (name,) = terms.keys() - {"ce"}
    return torch.autograd.grad(terms[name].values.sum(), z_s)[0]


def buckets(z: Tensor, top: Tensor, temperature: float) -> Tensor:
    """By the definition: probabilities of the tokens that are stored, then one minus their sum."""
    p = torch.softmax(z / temperature, -1)
    few = torch.stack([p[..., i] for i in range(V)], -1).gather(-1, top)
    return torch.cat([few, 1 - few.sum(-1, keepdim=True)], -1)


@pytest.mark.parametrize("temperature", [1.0, 2.0, 0.7])
def test_the_gradient_is_that_of_k_tokens_and_one_bucket(temperature: float) -> None:
    z_t, z_s = logits(0), logits(0) + logits(1) / 10
    form = Form(6, "bucket", (0.7, 1.0, 2.0))
    top = z_t.topk(6).indices
    factor = temperature**2
    formulas: dict[type[Objective], Callable[[Tensor, Tensor], Tensor]] = {
        Hinton: lambda p, q: p * (p / q).log(),
        ReverseKL: lambda p, q: q * (q / p).log(),
        JensenShannon: lambda p, q: (p * (2 * p / (p + q)).log() + q * (2 * q / (p + q)).log()) / 2,
    }
    for method, formula in formulas.items():
        z = z_s.clone().requires_grad_()
        p, q = buckets(z_t, top, temperature), buckets(z, top, temperature)
        (exact,) = torch.autograd.grad(factor * formula(p, q).sum(), z)
        found = gradient(method(temperature=temperature), z_s, stored_as(form, z_t))  # type: ignore[call-arg]
        assert (found - exact).norm() < 0.02 * exact.norm()  # of 16 bits
        tail = torch.softmax(z_t, -1).pow(1 / temperature).scatter(-1, top, 0.0).sum(-1).log()
        kept = TopTokens(top, {temperature: tail}, {})
        precise = Outputs(torch.log_softmax(z_t, -1).gather(-1, top), {}, top_k=kept)
        torch.testing.assert_close(gradient(method(temperature=temperature), z_s, precise), exact, rtol=0, atol=1e-9)  # type: ignore[call-arg]


def test_a_bucket_is_nearer_to_the_whole_distribution_than_k_renormalised() -> None:
    z_t, z_s = logits(0), logits(0) + logits(1) / 10
    whole = gradient(Hinton(1.0), z_s, Outputs(z_t, {}))
    errors = [
        (gradient(Hinton(1.0), z_s, stored_as(form, z_t)) - whole).norm() / whole.norm()
        for form in (Form(6, "bucket", (1.0,)), Form(6, "renormalize", ()))
    ]
    assert errors[0] < 0.7 * errors[1]
    same = gradient(Hinton(1.0), z_s, stored_as(Form(None, "bucket", ()), z_t))
    assert torch.equal(same, whole)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_the_mean_gradient_of_draws_is_that_of_the_whole_distribution(temperature: float) -> None:
    z_t, z_s, form = logits(0), logits(1), Form(8, "sample", (temperature,))
    whole = gradient(Hinton(temperature), z_s, Outputs(z_t, {}))
    draws = [gradient(Hinton(temperature), z_s, stored_as(form, z_t, first)) for first in range(0, 400 * N * T, N * T)]
    p = torch.softmax(z_t / temperature, -1)
    spread = temperature * (p * (1 - p) / (8 * len(draws))).sqrt()  # of independent draws; these vary less
    z_scores = ((torch.stack(draws).mean(0) - whole) / spread).abs()
    assert z_scores.mean() < 0.8
    assert z_scores.max() < 6
    assert (draws[0] - draws[1]).norm() > 0.05 * whole.norm()


def test_only_tokens_that_count_are_stored_however_texts_are_padded(tmp_path: Path) -> None:
    labels = torch.tensor([[IGNORED, 3, 4, IGNORED], [IGNORED] * 4, [5, IGNORED, IGNORED, 6]])
    inputs, rows = torch.arange(12).view(3, 4), torch.arange(3)
    batch = Batch(inputs, labels, rows, rows, 3, 1, 0)
    wider = batch._replace(inputs=F.pad(inputs, (0, 2), value=9), labels=F.pad(labels, (0, 2), value=IGNORED))
    texts = read_texts([batch], 3)
    assert texts.digest == read_texts([wider.part(0, 1), wider.part(1, 3)], 3).digest
    assert texts.counts.tolist() == [2, 0, 2]
    for changed in (inputs.clone().fill_(1), inputs.flip(1)):
        assert read_texts([batch._replace(inputs=changed)], 3).digest != texts.digest
    form = Form(2, "bucket", (1.0,))
    z = with_seed(0, lambda: torch.randn(3, 4, V))
    entries = form.reduce(z[labels >= 0], 0)
    assert {len(x) for x in entries.values()} == {4}
    outputs = form.expand(entries, labels >= 0)
    expected = torch.log_softmax(z, -1).topk(2).values.where((labels >= 0)[..., None], 0.0)
    torch.testing.assert_close(outputs.logits, expected, rtol=1e-3, atol=0)
    assert sum(x[0].nbytes for x in form.reduce(torch.zeros(1, 2**16), 0).values()) == 2 * (2 + 2 + 1)


@pytest.mark.parametrize("top_k", ["all", 5])
def test_responses_of_conversations_are_stored_whatever_batch_they_are_in(top_k: Any, tmp_path: Path) -> None:
    def trained(
        stored: Stored | None, teacher: nn.Module | None = None, chunk: int = 0, **options: Any
    ) -> dict[str, Tensor]:
        data = chat(tmp_path, max_length=64, train_size=17, **options)
        module = distil(data, tmp_path / "kept", stored, {"kd": Hinton}, teacher, chunk)
        return weights(fit(module, data, precision="64-true"))

    kept = trained(Stored(top_k))
    path = kept_in(tmp_path / "kept")
    teacher = StoredTeacher(256, json.loads((path / "facts.json").read_text())["teacher"])
    assert_same(kept, trained(Stored(top_k), teacher))
    trained(Stored(top_k), teacher, batch_size=4)
    assert kept_in(tmp_path / "kept") == path
    if top_k == 5:
        assert_same(kept, trained(Stored(top_k), teacher, pack=True), atol=1e-9)
        assert_same(kept, trained(Stored(top_k), teacher, chunk=16), atol=1e-9)
    else:  # but for the last bits, as kernels for other widths add in another order
        assert_same(kept, trained(None), atol=1e-12)
