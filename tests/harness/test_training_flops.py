"""Operations of a training are the sum of those of its batches, counted one by one."""

from pathlib import Path
from typing import Any

import pytest
import torch

from harness.studies.operations import count_operations, flops
from harness.studies.text.training_flops import count_training
from harness.studies.training_flops import LearnedBatches
from lit_modules.distillation import Distillation
from lit_modules.objectives import CrossEntropy, Hinton, Linearize, Objective
from lit_modules.tasks import Tokens
from tests.callbacks import StopAt
from tests.chats import chat
from tests.language import gpt, on_policy, text
from tests.lit_modules.objectives.test_linearize import _distillation as aligned
from tests.lit_modules.text.test_on_policy import ENDS, V, chats, gkd
from tests.lit_modules.text.test_on_policy import module as of_chats
from tests.training import fit


def students(objective: Objective, **options: Any) -> Distillation:
    nets = {"a": (gpt(vocab_size=V, block_size=512, num_layers=1), objective)}
    options = {"num_classes": V, "task": Tokens(), "input_dtype": torch.int64, "end_tokens": ENDS} | options
    return Distillation(gpt(vocab_size=V, block_size=512, seed=7), nets, input_shape=(16,), **options)


def counted(module: Distillation, data: Any) -> tuple[int | None, LearnedBatches]:
    trained = LearnedBatches.of(data, module.training_log.samples)
    accumulated = data.trainer.accumulate_grad_batches
    return count_training(module, "a", accumulated, data.typical_batch().batch, trained), trained


@pytest.mark.parametrize(("objective", "chunk", "options"), [
    (CrossEntropy, 0, {"sort_lengths": True}), (Hinton, 3, {}), (Hinton, 0, {"pack": True, "loss_per": "sequence"}),
])  # fmt: skip
def test_rows_of_many_lengths(objective: type[Objective], chunk: int, options: dict[str, Any], tmp_path: Path) -> None:
    """Also of an epoch that was cut off, of packed texts, and where only the tokens that count have logits."""
    data, module = chat(tmp_path, **options), students(objective(), loss_chunk=chunk)
    fit(module, data, max_steps=9, max_epochs=-1)
    loader, batches = data.train_dataloader(), []
    for epoch in (0, 1):
        loader.sampler.set_epoch(epoch)
        batches += [*loader]
    batches = batches[:9]
    assert len(loader) < 9 < 2 * len(loader)
    assert len({batch.inputs.shape[1] for batch in batches}) > 3
    expected = sum(flops(module.timed_steps("a", batch)[0.0]) or 0 for batch in batches)
    assert counted(module, data)[0] == expected


def test_accumulated_batches_cost_what_one_does(tmp_path: Path) -> None:
    costs = []
    for batch_size, accumulated in ((12, 1), (6, 2), (4, 3)):
        data = text(tmp_path, batch_size=batch_size)
        module = students(CrossEntropy(), loss_chunk=3)
        fit(module, data, max_epochs=1, accumulate_grad_batches=accumulated)
        costs.append(counted(module, data)[0])
    assert len({*costs}) == 1


def test_phases_have_the_batches_that_they_trained_on(tmp_path: Path) -> None:
    """The first phase ends within an epoch; the student's time ends within the second one."""
    data = text(tmp_path)
    module = aligned(data, Linearize(0.4))
    fit(module, data, max_epochs=2, callbacks=[StopAt("a", 7)])
    trained = LearnedBatches.of(data, module.stopped["a"]["samples"])
    batch = data.typical_batch().batch
    steps = module.timed_steps("a", batch)
    first, second = (flops(step) or 0 for step in steps.values())
    rows = trained.shapes.rows.tolist()
    assert (rows, first != second) == ([13] * 4 + [3] + [13] * 2, True)
    expected = first * sum(rows[:4]) / 13 + second * sum(rows[4:]) / 13
    assert count_training(module, "a", 1, batch, trained) == round(expected)
    assert [share for _, share in trained.shares(steps, module.batches_planned)] == [4 / 7, 3 / 7]


def test_written_texts_count_as_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, module, learned = chats(tmp_path), of_chats({"a": gkd(0.5)}, double=False), []
    written_texts = on_policy(module)
    take = written_texts.generated_batches

    def spy(loop: Any, batch: Any) -> Any:
        texts = take(loop, batch)
        learned.append(texts.get("a", batch))
        return texts

    monkeypatch.setattr(written_texts, "generated_batches", spy)
    fit(module, data, max_epochs=3)
    monkeypatch.undo()
    written = [batch for batch in learned if batch.is_written]
    assert 0 < len(written) < len(learned) == 9
    expected = sum(flops(module.timed_steps("a", batch._replace(is_written=True))[0.0]) or 0 for batch in learned)
    found, _ = counted(module, data)
    one: list[Any] = []
    writing = count_operations(lambda: one.append(written_texts.timed_batch(module, "a", data.typical_batch().batch)))
    tokens = sum(batch.inputs.numel() for batch in written)
    assert found == expected + round((writing or 0) * tokens / one[0].inputs.numel())
