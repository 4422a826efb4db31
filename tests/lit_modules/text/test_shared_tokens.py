"""A teacher that is asked in the tokens of another tokenizer: over the shared ones losses are the formulas'."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from apprentice.batch import Batch
from lit_modules.distillation import Distillation
from lit_modules.nets import HuggingFaceLM, Outputs
from lit_modules.nets.generation import Generated, check_writer, generate
from lit_modules.nets.shared_tokens import SharedTokens, mass_outside
from lit_modules.objectives import DIST, GKD, NKD, Hinton, ReverseKL
from lit_modules.tasks import Tokens
from lit_modules.text.text_batches import cut_before
from tests import with_transformers
from tests.commands import bad_input
from tests.language_parts import save_llama
from tests.lit_modules.text.test_on_policy import sharp

SIZE = 290  # V of the students' tokenizer
NUMBERS = {
    "more": torch.arange(SIZE),  # the teacher has others after them
    "fewer": torch.arange(SIZE).where(torch.arange(SIZE) < SIZE - 3, -1),
    "other": torch.arange(SIZE).roll(4).where(torch.arange(SIZE) % 97 != 96, -1),
}


def net(folder: Path, layers: int) -> Any:
    save_llama(folder / str(layers), vocab_size=300, num_hidden_layers=layers)
    return sharp(HuggingFaceLM(str(folder / str(layers)), SIZE, 16, pretrained=True)).double()


@pytest.mark.extras("transformers")
@pytest.mark.parametrize("kind", NUMBERS)
@pytest.mark.parametrize("chunk", [0, 3])
@with_transformers.in_fork
def test_shared_tokens_are_compared(kind: str, chunk: int, folder: Path) -> None:
    numbers = NUMBERS[kind]
    kept = (numbers >= 0).nonzero().flatten()
    teacher, methods = net(folder, 2).in_tokens(SIZE, SharedTokens(numbers)), (Hinton(2, 0.5, 0.25), ReverseKL(1, 1, 0))
    students = {str(i): (net(folder, 1), method) for i, method in enumerate((*methods, GKD(0.3), GKD(1.0)))}
    shapes: dict[str, Any] = {"input_shape": (8,), "num_classes": SIZE, "task": Tokens(), "loss_chunk": chunk}
    made = Distillation(teacher, students, **shapes, input_dtype=torch.int64).double()
    tokens = kept[torch.randint(len(kept), (2, 9), generator=torch.Generator().manual_seed(2))]
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    log_p = teacher.model(numbers[inputs]).logits[..., numbers[kept]].log_softmax(-1).detach()

    def loss(number: int, student: Any) -> Tensor:
        z = student.model(inputs).logits[..., :SIZE]
        log_q = z[..., kept].log_softmax(-1)
        if number == 0:
            hot_p, hot_q = ((x / 2).log_softmax(-1) for x in (log_p, log_q))
            ce = nn.functional.cross_entropy(z.flatten(0, 1), labels.flatten())
            return 2 * (hot_p.exp() * (hot_p - hot_q)).sum(-1).mean() + 0.25 * ce
        if number == 2:
            m = 0.3 * log_p.exp() + 0.7 * log_q.exp()
            parts = (weight * (x.exp() * (x - m.log())).sum(-1) for weight, x in ((0.3, log_p), (0.7, log_q)))
            return sum(parts, start=torch.zeros(())).mean()
        return (log_q.exp() * (log_q - log_p)).sum(-1).mean()

    outputs = made(inputs)
    total, values = made.losses(outputs, Batch.of((inputs, labels), 0))
    expected = [loss(i, student.net) for i, student in enumerate(made.students.values())]
    for i, x in enumerate(expected):
        torch.testing.assert_close(values[f"{i}/loss"].mean(), x, rtol=1e-9, atol=1e-12)
    nets: list[Any] = [student.net for student in made.students.values()]
    weights = [student.model.get_input_embeddings().weight for student in nets]
    pairs = zip(*(torch.autograd.grad(x, weights) for x in (total, torch.stack(expected).sum())), strict=True)
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-12)


@pytest.mark.extras("transformers")
@pytest.mark.parametrize("kind", NUMBERS)
@with_transformers.in_fork
def test_a_teacher_reads_and_writes_the_other_tokens(kind: str, folder: Path) -> None:
    numbers = NUMBERS[kind]
    whole = net(folder, 2)
    asked, kept = whole.in_tokens(SIZE, SharedTokens(numbers)), (numbers >= 0).nonzero().flatten()
    tokens, starts = kept[torch.tensor([[5, 6, 7, 8, 9]])], torch.tensor([[0, 0, 2, 2, 2]])
    torch.testing.assert_close(asked(tokens, starts)[:, 2:], asked(tokens[:, 2:]), rtol=0, atol=1e-9)
    if kind == "more":
        assert torch.equal(asked(tokens), whole(tokens))  # to the bit
    check_writer(asked)
    lengths = torch.tensor([5])
    written = generate(asked, tokens, lengths, 4, torch.tensor([3]))
    assert torch.equal(written.tokens, generate(asked, tokens, lengths, 4, torch.tensor([3]), cached=False).tokens)
    assert torch.isin(written.tokens, kept).all()
    rows = whole.row_logits(numbers[tokens]).softmax(-1)
    share = mass_outside(asked.row_logits(tokens), asked.shared_tokens.kept())
    torch.testing.assert_close(share, 1 - rows[..., numbers[kept]].sum(-1), rtol=1e-9, atol=1e-12)


def test_texts_are_matched() -> None:
    """By their texts, and ends of texts with each other; None where more than added tokens differ."""
    ours, theirs = {"a": 0, "b": 1, "<x>": 2, "<end>": 3}, {"<eos>": 0, "a": 1, "b": 2, "<y>": 3}
    added = {"<x>", "<y>", "<end>", "<eos>"}
    found = SharedTokens.match(5, ours, theirs, added, ("<end>", "<eos>"))
    assert found is not None
    assert found.numbers.tolist() == [1, 2, -1, 0, -1]
    assert not found.keeps_numbers
    assert SharedTokens.match(5, ours, {**theirs, "c": 4}, added) is None


def test_what_is_written_ends_before_a_token_that_the_teacher_lacks() -> None:
    texts = Generated(torch.tensor([[5, 7, 7], [7, 5, 5], [5, 5, 7]]), torch.tensor([3, 3, 2]))
    assert cut_before(texts, torch.tensor([7, 9])).lengths.tolist() == [1, 0, 2]
    assert cut_before(texts, torch.tensor([], dtype=torch.int64)).lengths.tolist() == [3, 3, 2]


@pytest.mark.parametrize("method", [NKD, DIST])
def test_methods_of_single_classes_need_them_all(method: type[NKD] | type[DIST]) -> None:
    z = torch.zeros(2, 3, 7)
    lacking = Outputs(z.index_fill(-1, torch.tensor([2]), -torch.inf), {})
    method().build(Outputs(z, {}), Outputs(z, {}))
    assert "the teacher lacks some of the data's tokens" in bad_input(method().build, Outputs(z, {}), lacking)
