"""A teacher with other tokens than the student: the loss is the formula's, and TRL's; by the command, too."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from apprentice.batch import IGNORED, Batch
from apprentice.errors import BadInput
from datamodules.text.vocabulary import Subwords, Vocabulary, token_texts
from experiments import kd
from lit_modules.distillation import Distillation
from lit_modules.nets import Ensemble, Outputs
from lit_modules.nets.other_tokens import OtherTokens, TokenTexts, text_lengths
from lit_modules.objectives import ULD
from lit_modules.tasks import Tokens
from lit_modules.text.on_policy import OnPolicyTexts
from tests import with_transformers
from tests.chats import rows, write_lines
from tests.commands import results
from tests.language import gpt
from tests.lit_modules.text.test_on_policy import NETS, sharp

OURS = [b"", b"a", b"b", b"c", b"ab", b"\xc3", b"\xa9", b"."]  # two of them a character
THEIRS = [b"!", b"a", b"b", b"c", b"bc", b"ca", "é".encode(), b".", b"aa"]


def longest_first(text: str, texts: Sequence[bytes] = THEIRS) -> list[int]:
    whole, tokens = text.encode(), []
    while whole:
        token = max((t for t in range(len(texts)) if whole.startswith(texts[t])), key=lambda t: len(texts[t]))
        tokens.append(token)
        whole = whole[len(texts[token]) :]
    return tokens


def teacher() -> OtherTokens:
    net = sharp(gpt(len(THEIRS), 16, seed=5)).double()
    return OtherTokens(net, TokenTexts(OURS, longest_first), TokenTexts(THEIRS, longest_first))


def module(objective: ULD) -> Distillation:
    shapes: dict[str, Any] = {"input_shape": (9,), "num_classes": len(OURS), "task": Tokens()}
    student = sharp(gpt(len(OURS), 16, num_layers=1))
    return Distillation(teacher(), {"uld": (student, objective)}, **shapes, input_dtype=torch.int64).double()


#           a  b  c  ab c  é     .  a        filled up
TEXTS = torch.tensor([[1, 2, 3, 4, 3, 5, 6, 7, 1, 1], [3, 1, 4, 1, 1, 7, 0, 0, 0, 0]])


def group_by_hand(tokens: list[int], others: list[int]) -> list[tuple[list[int], list[int]]]:
    """Places of tokens, of both, between one common byte and the next."""

    def ends(numbers: list[int], texts: Sequence[bytes]) -> list[int]:
        return [sum(len(texts[t]) for t in numbers[: i + 1]) for i in range(len(numbers))]

    ours, theirs = ends(tokens, OURS), ends(others, THEIRS)
    common, groups, start = sorted({*ours} & {*theirs}), [], 0
    for end in common:
        groups.append((
            [i for i, e in enumerate(ours) if start < e <= end], [i for i, e in enumerate(theirs) if start < e <= end],
        ))  # fmt: skip
        start = end
    return groups


def joint(net: nn.Module, tokens: list[int], places: list[int]) -> Tensor:
    """The probabilities of a group's tokens but the last, times the last one's distribution."""
    p = net(torch.tensor([tokens[: places[-1]]]))[0].softmax(-1)
    product = p[places[-1] - 1]
    for place in places[:-1]:
        product = product * p[place - 1, tokens[place]]
    return product


@pytest.mark.parametrize("match", [False, True])
def test_the_loss_is_the_formulas_group_by_group(match: bool) -> None:
    made = module(ULD(match, 1.5, 0.5, 0.3, 0.25))
    inputs, labels = TEXTS[:, :-1], TEXTS[:, 1:].clone()
    labels[:, 0] = IGNORED  # a prompt of two tokens
    labels[1, 5:] = IGNORED
    outputs = made(inputs, text_lengths(inputs, labels))
    loss = made.losses(outputs, Batch.of((inputs, labels), 0))[0]
    student, net, count = made.students["uld"].net, made.teacher.net, int((labels >= 0).sum())
    common = [(i, THEIRS.index(t)) for i, t in enumerate(OURS) if t in THEIRS] if match else []
    assert made.teacher.matched[0].tolist() == [1, 2, 3, 7]
    total, sizes = torch.zeros(()), []
    for row, length in ((0, 9), (1, 6)):
        tokens = inputs[row, :length].tolist()
        text = b"".join(OURS[t] for t in tokens)
        others = longest_first(text.decode())
        groups = [*group_by_hand(tokens, others), ([length], [len(others)])]
        for ours, theirs in groups:
            if min(ours[0], theirs[0]) < 1 or (labels[row, [i - 1 for i in ours]] < 0).any():
                continue
            sizes.append((len(ours), len(theirs)))
            s = joint(student, [*tokens, int(labels[row, length - 1])], ours)
            t = joint(net, [*others, 0], theirs).detach()
            keep = [[i for i in range(len(x)) if i not in {pair[k] for pair in common}] for k, x in enumerate((s, t))]
            a, b = s[keep[0]].sort(descending=True).values, t[keep[1]].sort(descending=True).values
            width = max(len(a), len(b))
            a, b = (torch.cat([x, x.new_zeros(width - len(x))]) for x in (a, b))
            total = total + 1.5 * (a - b).abs().sum()
            for i, j in common:
                m = 0.3 * t[j] + 0.7 * s[i]
                total = total + 0.5 * (0.3 * t[j] * (t[j] / m).log() + 0.7 * s[i] * (s[i] / m).log())
    assert {(1, 1), (2, 1)} < {*sizes}
    ce = nn.functional.cross_entropy(student(inputs)[labels >= 0], labels[labels >= 0])
    expected = total / count + 0.25 * ce
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-12)
    parameters = [*student.parameters()]
    for ours, theirs in zip(*(torch.autograd.grad(x, parameters) for x in (loss, expected)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-12)


def test_probabilities_of_groups_do_not_round_with_the_length_of_a_text() -> None:
    """Two tokens in each group of 3,000: at 32 bits each value is that at 64 bits, at the end of the text, too."""
    g, sizes = torch.Generator().manual_seed(0), torch.tensor([0.0, 2.0]).repeat(1500)
    student, teacher = (torch.randn(1, 3000, 8, generator=g) * 3 for _ in range(2))
    labels = torch.randint(8, (1, 3000), generator=g)
    of_groups = torch.cat([sizes[None, :, None], teacher.log_softmax(-1)], -1)

    def values(dtype: torch.dtype) -> Tensor:
        outputs = (Outputs(x.to(dtype), {}) for x in (student, of_groups))
        return ULD(match=False)(*outputs, labels)["sorted"].values

    torch.testing.assert_close(values(torch.float32).double(), values(torch.float64), rtol=0, atol=3e-6)


@pytest.mark.extras("trl")
@pytest.mark.parametrize("match", [False, True])
def test_the_loss_is_that_of_trl(match: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    from trl.experimental.gold.gold_trainer import ULDLoss

    made = module(ULD(match, 0.6, 0.4, 0.3, 0.0))
    inputs, labels = TEXTS[:1, :-1], TEXTS[:1, 1:].clone()
    labels[:, :2], labels[:, -1] = IGNORED, IGNORED
    parts = made.losses(made(inputs), Batch.of((inputs, labels), 0))[1]
    ours, others = inputs[0].tolist(), longest_first(b"".join(OURS[t] for t in inputs[0].tolist()).decode())
    names = {"uld_crossentropy_weight": 0.0, "uld_distillation_weight": 1.0, "uld_student_temperature": 1.0}
    names |= {"uld_teacher_temperature": 1.0, "uld_skip_student_eos": False, "uld_skip_teacher_eos": False}
    names |= {
        "use_extended_uld": True,
        "uld_token_merge_strategy": "bayesian",
        "uld_use_hybrid_loss": match,
        "beta": 0.3,
    }
    config = SimpleNamespace(**names, uld_hybrid_matched_weight=0.4, uld_hybrid_unmatched_weight=0.6)
    theirs = ULDLoss(config)
    s, t = made.teacher.matched
    theirs._vocab_mapping = dict(zip(t.tolist(), s.tolist(), strict=True))
    theirs._teacher_matched_ids, theirs._student_matched_ids = {*t.tolist()}, {*s.tolist()}
    theirs.mapping_tensor = torch.zeros(len(THEIRS), dtype=torch.int64).index_put((t,), s)
    start = 3  # tokens before the response

    def offsets(tokens: list[int], texts: Sequence[bytes]) -> Tensor:
        ends = torch.tensor([len(texts[token]) for token in tokens]).cumsum(0)
        return torch.stack([torch.cat([ends.new_zeros(1), ends[:-1]]), ends], -1)[None]

    s_offsets, t_offsets = offsets(ours, OURS), offsets(others, THEIRS)
    first = int((t_offsets[0, :, 1] > s_offsets[0, start, 0]).nonzero()[0])
    answers = [torch.tensor([[IGNORED] * k + x[k:]]) for k, x in ((start, ours), (first, others))]
    logits = made.students["uld"].net(inputs), made.teacher.net(torch.tensor([others]))
    ids = torch.tensor([ours]), torch.tensor([others])
    value = theirs._compute_distillation_loss(*logits, *answers, *ids, s_offsets, t_offsets)
    groups = int((made(inputs)[0].logits[0, start - 1 : -1, 0] > 0).sum())
    share = groups / int((labels >= 0).sum())  # TRL divides by groups
    mine = 0.6 * parts["uld/sorted"] + 0.4 * parts["uld/direct"] if match else parts["uld/sorted"]
    torch.testing.assert_close(mine.mean(), value * share, rtol=1e-6, atol=1e-9)


def test_texts_that_end_within_a_character_are_read_up_to_it() -> None:
    whole = teacher()(torch.tensor([[1, 7, 5, 6, 1]]))
    cut = teacher()(torch.tensor([[1, 7, 5]]))
    assert whole[0, :, 0].tolist() == [1, 0, 2, 1, 1]
    assert cut[0, :, 0].tolist() == [1, 0, 0]
    wrong = teacher()(torch.tensor([[1, 7, 6, 1, 1]]))  # no character
    assert wrong[0, :, 0].tolist() == [1, 0, 0, 0, 0]


@pytest.mark.parametrize("filled", [0, 3])
def test_a_row_ends_where_its_labels_do_whatever_fills_it_up(filled: int) -> None:
    """Token 0 is a text of its own: a response that ends with it, before the token of its end, has it."""
    ours = [b"!", *OURS[1:], b"<end>"]
    asked = OtherTokens(gpt(len(THEIRS), 16).double(), TokenTexts(ours, list), TokenTexts(THEIRS, longest_first))
    text, end = [1, 7, 0, 0], len(ours) - 1
    inputs = torch.tensor([[*text, filled, filled], [*text, 1, 1]])
    labels = torch.tensor([[IGNORED, 0, 0, end, IGNORED, IGNORED], [IGNORED, 0, 0, 1, 1, end]])
    found = asked(inputs, text_lengths(inputs, labels))
    torch.testing.assert_close(found[0, :4], asked(inputs[:1, :4])[0], rtol=0, atol=1e-12)
    assert found[:, :, 0].tolist() == [[1, 1, 1, 1, 0, 0], [1, 1, 1, 0, 2, 1]]  # theirs have one token of "aa"
    assert not found[0, 4:].any()


def test_written_texts_have_their_own_ends() -> None:
    """What fills up a row of a shorter text is not read, though it comes after the last token that is learned."""
    made, labels = module(ULD()), TEXTS[:, 1:].clone()
    labels[1, 4:] = IGNORED
    texts = {name: Batch.of((TEXTS[:, :-1].where(torch.arange(9) < end, 1), labels), 0) for name, end in (("uld", 6),)}
    whole = Batch.of((TEXTS[:, :-1], labels), 0)
    written = OnPolicyTexts(made.students, made.teacher, None, (), 0, print)
    scored, expected = (written._score(made, given)["uld"].logits for given in (texts, {"uld": whole}))
    torch.testing.assert_close(scored[1], expected[1], rtol=0, atol=1e-12)


def test_several_teachers_read_as_much_of_a_text_as_the_shortest_of_them_can() -> None:
    """Nine tokens of the student are twelve of the teachers, of which one reads six."""
    tokens = TokenTexts(OURS, list), TokenTexts([bytes([byte]) for byte in range(256)], lambda text: [*text.encode()])
    teachers = [gpt(256, size, seed=size).double() for size in (6, 9)]
    ours = torch.tensor([[5, 6, 5, 6, 5, 6, 4, 4, 4]])
    groups = OtherTokens(Ensemble(teachers), *tokens)(ours)[0, :, 0]
    assert groups.tolist() == OtherTokens(teachers[0], *tokens)(ours)[0, :, 0].tolist()
    assert groups.tolist() == [1, 1, 1, 1, 1, 0, 0, 0, 0]


def test_bytes_of_tokens_are_those_of_the_text() -> None:
    assert token_texts(Vocabulary(), "x")[65] == b"A"
    assert token_texts(Vocabulary("éa"), "x") == [b"a", "é".encode()]


@pytest.mark.extras("transformers")
@with_transformers.in_fork
def test_bytes_of_subwords_are_those_of_the_text(tmp_path: Path) -> None:
    from tests.language_parts import save_tokenizer

    save_tokenizer(tmp_path)
    words = Subwords(str(tmp_path))
    texts, text = token_texts(words, "x"), "the quick é <|im_end|>\n"
    assert b"".join(texts[t] for t in words.encode(text).tolist()) == text.encode()


FLAGS = [*NETS, "--teacher_tokenizer", "characters", "--seeds", "1", "--trainer.max_epochs", "1"]


def data(folder: Path) -> list[str]:
    path = write_lines(folder / "chat.jsonl", rows(40, 4))
    sizes = ["--data.batch_size", "8", "--data.validation_size", "4", "--data.test_size", "4"]
    return ["--data", "Chat", "--data.path", str(path), *sizes]


def test_the_command_compares_over_two_tokenizers(tmp_path: Path) -> None:
    kd.main([*data(tmp_path), *FLAGS, "--only", "ce", "uld", "--out", str(tmp_path / "run")])
    found = results(tmp_path / "run")
    assert found["students"]["uld"]["test_loss"][0] > 0
    facts = json.loads((tmp_path / "run" / "seed0" / "teacher" / "vocabulary.json").read_text())
    assert facts["characters"]
    assert json.loads((tmp_path / "run" / "seed0" / "uld" / "vocabulary.json").read_text())["characters"] is None


def test_methods_of_one_tokenizer_are_refused(tmp_path: Path, refusal: Callable[..., str]) -> None:
    with pytest.raises(BadInput, match=r"^variants\.x\.teacher GPT: expected `teacher_tokenizer` beside it"):
        Distillation(gpt(), {"x": (gpt(), ULD())}, (8,), 11, task=Tokens(), input_dtype=torch.int64)
    with pytest.raises(BadInput, match=r"^beta 2: expected a number from 0 to 1"):
        ULD(beta=2)
    line = refusal(kd.main, *data(tmp_path), *FLAGS, "--only", "ce", "kd")
    assert "--variants.kd Hinton: expected ULD, or a method without a teacher, beside --teacher_tokenizer" in line
    line = refusal(kd.main, "--data", "Digits", "--teacher_tokenizer", "bytes", "--only", "ce")
    assert "--teacher_tokenizer bytes: expected texts, not --data Digits" in line


def test_conversations_that_one_tokenizer_leaves_out_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Parts would be drawn from others: the teacher would learn prompts that its students are tested on."""
    long = [{"prompt": f"{i} {'é' * 40}", "response": "ab"} for i in range(3)]
    path = write_lines(tmp_path / "chat.jsonl", [*long, *rows(20, 4)])
    flags = ["--data", "Chat", "--data.path", str(path), "--data.max_length", "80", "--data.batch_size", "8"]
    with pytest.raises(SystemExit):
        kd.main([*flags, *FLAGS, "--only", "ce", "uld", "--out", str(tmp_path / "run")])
    *_, line = capsys.readouterr().err.splitlines()
    expected = "expected 20 conversations in its tokens, too, not 23: with a larger --data.max_length than 80"
    assert line == f"error: --teacher_tokenizer characters: {expected} both have all"
