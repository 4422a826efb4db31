"""Students of a teacher's own responses: the loss is a formula's, and what the teacher writes is written once."""

from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from apprentice.errors import BadInput
from experiments import kd
from lit_modules.distillation import Distillation
from lit_modules.nets.generation import Sampling, generate, row_keys
from lit_modules.objectives import CrossEntropy, Hinton, SequenceLevel, Sum
from lit_modules.text import generations
from strategies import FSDP
from tests.chats import rows, write_lines
from tests.commands import results
from tests.grids import mostly_slow
from tests.language import PACKED, text
from tests.lit_modules.text.test_on_policy import ENDS, NETS, chats, first_batch, gkd, module
from tests.training import SHAPE, assert_same, fit, net, on, outcome, weights


def sequence(temperature: float = 0.0) -> SequenceLevel:
    return SequenceLevel(5, temperature)


@pytest.mark.parametrize(("temperature", "chunk"), [(0.0, 0), (1.0, 3)])
def test_the_loss_is_the_cross_entropy_of_what_the_teacher_writes(
    temperature: float, chunk: int, tmp_path: Path
) -> None:
    made = module({"seq": sequence(temperature), "ce": CrossEntropy(), "gkd": gkd()}, loss_chunk=chunk).train()
    batch, losses, count = first_batch(tmp_path), [], 0
    _, parts = made.shard_step(batch)
    student, teacher = made.students["seq"].net, made.teacher
    for row in range(len(batch.inputs)):
        counted = (batch.labels[row] >= 0).nonzero()
        if not len(counted):
            continue
        prompt = batch.inputs[row, : int(counted[0]) + 1]
        key = row_keys(batch.index[row : row + 1], 3 if temperature else 0, *b"generations")
        options = {"keys": key, "sampling": Sampling(temperature), "ends": ENDS, "cached": False}
        written = generate(teacher, prompt[None], torch.tensor([len(prompt)]), 5, **options)
        response = written.tokens[0, : written.lengths[0]]
        logits = student(torch.cat([prompt, response])[None, :-1])[0, len(prompt) - 1 :]
        losses.append(F.cross_entropy(logits, response, reduction="sum"))
        count += len(response)
    expected = torch.stack(losses).sum() / count
    torch.testing.assert_close(parts["seq/loss"].mean(), expected, rtol=1e-10, atol=0)
    gradients = torch.autograd.grad(expected, [*student.parameters()])
    made.shard_step(batch)[0].backward()
    for p, gradient in zip(student.parameters(), gradients, strict=True):
        torch.testing.assert_close(p.grad, gradient, rtol=0, atol=1e-10)


@pytest.mark.parametrize("place", mostly_slow(["ddp 3", "ddp 2 exact 4"], "ddp 3"))
def test_any_number_of_ranks_gives_the_same_student(place: str, tmp_path: Path) -> None:
    (logs := tmp_path / "logs").mkdir()
    make = lambda: module({"seq": sequence(1.0), "kd": Hinton()})  # noqa: E731
    one = outcome(make(), chats(tmp_path), logs, ["seq/train/loss"])
    other = outcome(make(), chats(tmp_path), logs, ["seq/train/loss"], **on(place))
    assert other[0] == pytest.approx(one[0], abs=1e-9, rel=0)
    assert_same(one[1], other[1], atol=1e-9)


def test_alone_as_in_company_and_in_accumulated_batches(tmp_path: Path) -> None:
    alone = weights(fit(module({"seq": sequence()}), chats(tmp_path, 9)))
    company = weights(fit(module({"seq": sequence(), "kd": Hinton()}), chats(tmp_path, 3), accumulate_grad_batches=3))
    assert_same(alone, {key: x for key, x in company.items() if ".seq." in key}, atol=1e-9)


def test_responses_are_written_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(temperature: float = 0.0, batch_size: int = 6) -> dict[str, torch.Tensor]:
        made = module({"seq": sequence(temperature), "too": sequence(temperature)}, teacher_cache_dir=tmp_path / "kept")
        return weights(fit(made, chats(tmp_path, batch_size)))

    calls: list[int] = []

    def counted(net: torch.nn.Module, prompts: torch.Tensor, *args: object, **options: object) -> object:
        calls.append(len(prompts))
        return generate(net, prompts, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(generations, "generate", counted)
    first = run()
    assert calls == [8, 8, 2]
    assert_same(run(), first)
    run(batch_size=4)
    assert calls == [8, 8, 2]
    files = sorted((tmp_path / "kept").glob("responses-*/*.safetensors"))
    assert [file.name for file in files] == ["0.safetensors", "16.safetensors", "8.safetensors"]
    files[2].unlink()  # as a killed run leaves it
    assert_same(run(), first)
    assert calls == [8, 8, 2, 8]
    run(1.0)
    assert len({*(tmp_path / "kept").iterdir()}) == 2
    damaged = bytearray(files[0].read_bytes())
    damaged[-1] ^= 1
    files[0].write_bytes(damaged)
    with pytest.raises(BadInput, match=r"^teacher_cache_dir \S+/0\.safetensors: expected a file whose tensors"):
        run()


def test_what_can_not_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"^max_new_tokens 0: expected at least 1"):
        SequenceLevel(0)
    with pytest.raises(BadInput, match=r"^sampling_temperature -1: expected 0 or more"):
        SequenceLevel(sampling_temperature=-1)
    with pytest.raises(
        BadInput, match=r"^variants.a SequenceLevel: expected another method for inputs that are no texts"
    ):
        Distillation(net(), {"a": (net(seed=2), SequenceLevel())}, SHAPE)
    with pytest.raises(
        BadInput, match=r"^variants.seq SequenceLevel: expected `data.pack false`: a row has one prompt"
    ):
        module({"seq": sequence()}).check_data(PACKED)
    with pytest.raises(BadInput, match=r"^objectives SequenceLevel: expected parts with on_policy 0"):
        Sum([sequence(), Hinton()])
    with pytest.raises(BadInput, match=r"strategy FSDP: expected methods with on_policy 0, or ddp"):
        FSDP().check_module(module({"seq": sequence()}))
    with pytest.raises(BadInput, match=r"^data \S+: expected a data module whose texts are the same in each epoch"):
        fit(module({"seq": sequence()}), text(tmp_path))


@pytest.mark.slow
def test_the_command_keeps_responses_beside_a_stored_teacher(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "chat.jsonl", rows(40, 4))
    flags = [
        "--data", "Chat", "--data.path", str(path), "--data.batch_size", "6", "--data.validation_size", "4",
        "--data.test_size", "4", *NETS, "--only", "ce", "kd", "sequencelevel", "--seeds", "1",
        "--trainer.max_epochs", "1", "--variants.sequencelevel.max_new_tokens", "4",
    ]  # fmt: skip
    kept = ["--teacher_cache_dir", str(tmp_path / "kept"), "--teacher_top_k", "all"]
    kd.main([*flags, "--out", str(tmp_path / "plain")])
    kd.main([*flags, *kept, "--out", str(tmp_path / "first")])
    teacher = ["--teacher_ckpt", str(tmp_path / "first" / "seed0" / "teacher" / "weights.pt"), *kept]
    kd.main([*flags, *teacher, "--out", str(tmp_path / "second")])
    losses = [
        results(tmp_path / name)["students"]["sequencelevel"]["test_loss"] for name in ("plain", "first", "second")
    ]
    assert losses[0] == losses[1] == losses[2]
    assert losses[0][0] > 0
