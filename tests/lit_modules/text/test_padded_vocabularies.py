"""Models padded to unequal numbers of tokens: those of the tokenizer are compared, the rest can't be used."""

from pathlib import Path
from typing import Any

import pytest
import torch

from apprentice.batch import Batch
from apprentice.errors import BadInput
from lit_modules.distillation import Distillation
from lit_modules.nets import HuggingFaceLM
from lit_modules.objectives import ReverseKL
from lit_modules.tasks import Tokens
from tests import with_transformers
from tests.language_parts import VOCABULARY, save_llama


@pytest.mark.extras("transformers")
@pytest.mark.parametrize("chunk", [0, 3])
@with_transformers.in_fork
def test_common_tokens_are_compared(chunk: int, tmp_path: Path) -> None:
    save_llama(tmp_path / "teacher")  # of 300 tokens
    save_llama(tmp_path / "student", vocab_size=320, num_hidden_layers=1)
    teacher, student = (
        HuggingFaceLM(str(tmp_path / name), VOCABULARY, 8, pretrained=True) for name in ("teacher", "student")
    )
    for number, net in enumerate((teacher, student)):
        for parameter in net.parameters():
            g = torch.Generator().manual_seed(number)
            torch.nn.init.normal_(parameter, std=0.3, generator=g)
    shapes: dict[str, Any] = {"input_shape": (8,), "num_classes": VOCABULARY, "task": Tokens(), "loss_chunk": chunk}
    students = {"r": (student, ReverseKL(1.0, 1.0, 0.0))}
    made = Distillation(teacher, students, **shapes, input_dtype=torch.int64).double()
    tokens = torch.randint(VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(2))
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    loss = made.losses(made(inputs), Batch.of((inputs, labels), 0))[0]
    p, q = (net.model(inputs).logits[..., :VOCABULARY].log_softmax(-1) for net in (teacher, student))
    assert [net.model.config.vocab_size for net in (teacher, student)] == [300, 320]
    expected = (q.exp() * (q - p.detach())).sum(-1).mean()
    torch.testing.assert_close(loss.double(), expected.double(), rtol=1e-6, atol=1e-9)
    rows = student.model.get_input_embeddings().weight
    (ours,), (theirs,) = (torch.autograd.grad(x, [rows]) for x in (loss, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-9)
    assert not ours[VOCABULARY:].any()


@pytest.mark.extras("transformers")
@with_transformers.in_fork
def test_tokens_beyond_a_model_are_refused(tmp_path: Path) -> None:
    save_llama(tmp_path / "small", vocab_size=280)
    with pytest.raises(BadInput, match=f"expected a model for {VOCABULARY} tokens; it has 280"):
        HuggingFaceLM(str(tmp_path / "small"), VOCABULARY, 8, pretrained=True)
