"""One denominator: however a batch of texts is cut, filled up or packed, it gives one loss and one gradient."""

import itertools
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim import SGD

from apprentice.batch import IGNORED, Batch
from apprentice.errors import BadInput
from datamodules import Chat
from datamodules.text.loaders import TextLoader, pack_texts
from lit_modules.distillation import Distillation
from lit_modules.nets import GPT, Ensemble
from lit_modules.nets.layers import check_keeps_apart
from lit_modules.objectives import Cosine, CrossEntropy, Hinton, ReverseKL
from lit_modules.tasks import Tokens
from tests.chats import WORDS, write_lines
from tests.grids import mostly_slow
from tests.language import PACKED, gpt
from tests.training import assert_same, fit, on, weights

LENGTHS = [2, 397, 3, 60, 9, 130, 5, 21, 90, 2, 250, 14]  # bytes of responses: rows of about 2 to 400 tokens
SGD_ONE = partial(SGD, lr=1.0)  # whose step is the gradient


def data(folder: Path, **options: Any) -> Chat:
    """12 conversations that train, one that is tested."""
    text = " ".join(WORDS * 6)
    lines = [{"prompt": f"{i}", "response": text[i : i + n - 1]} for i, n in enumerate([*LENGTHS, 9])]
    options = {"batch_size": 12, "validation_size": 0, "test_size": 1, "max_length": 410} | options
    made = Chat(write_lines(folder / "chat.jsonl", lines), **options)
    made.setup()
    return made


def distillation(chat: Chat) -> Distillation:
    small: dict[str, Any] = {"num_layers": 1, "embed_dim": 8, **chat.net_arguments}
    students: Any = {
        "ce": (gpt(**small), CrossEntropy()),
        "kd": (gpt(**small), Hinton()),
        "rk": (gpt(**small), ReverseKL()),
    }
    shapes: dict[str, Any] = {"input_shape": chat.input_shape, "num_classes": 256, "input_dtype": torch.int64}
    return Distillation(gpt(seed=1, **small), students, task=Tokens(), optimizer=SGD_ONE, **shapes)


def step(folder: Path, place: str = "auto 1", accumulated: int = 1, **options: Any) -> dict[str, Tensor]:
    """The weights of students after a step on all 12 conversations."""
    chat = data(folder, batch_size=12 // accumulated, **options)
    module = distillation(chat)
    exact = "exact" in place
    module = module if exact else module.double()
    double = {} if exact else {"precision": "64-true"}
    fit(module, chat, **on(place), max_epochs=1, accumulate_grad_batches=accumulated, **double)
    assert module.training_log.samples == 12
    return {name: value for name, value in weights(module).items() if name.startswith("students.")}


def formula(folder: Path, per: str) -> tuple[dict[str, Tensor], float]:
    """The step of the student `ce` by a plain loop over conversations, one by one, and its loss."""
    chat = data(folder)
    net, total, count = distillation(chat).students["ce"].net.double(), torch.zeros(()).double(), 0
    for place in range(12):
        inputs, labels = chat.split("train").take(torch.tensor([place]))
        losses = F.cross_entropy(net(inputs)[0], labels[0], ignore_index=IGNORED, reduction="sum")
        tokens = int((labels != IGNORED).sum())
        total = total + (losses if per == "token" else losses / tokens)
        count += tokens if per == "token" else 1
    (total / count).backward()
    return {f"students.ce.net.{n}": (p - p.grad).detach() for n, p in net.named_parameters()}, float(
        (total / count).detach()
    )


WAYS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "filled up": ("auto 1", 1, {}),
    "sorted": ("auto 1", 1, {"sort_lengths": True}),
    "packed": ("auto 1", 1, {"pack": True}),
    "accumulated 2": ("auto 1", 2, {}),
    "accumulated 4, sorted": ("auto 1", 4, {"sort_lengths": True}),
    "accumulated 4, packed": ("auto 1", 4, {"pack": True}),
    "2 ranks": ("ddp 2", 1, {}),
    "2 ranks, accumulated 2, packed": ("ddp 2", 2, {"pack": True}),
    "3 ranks, accumulated 4": ("ddp 3", 4, {}),
    "3 ranks, packed": ("ddp 3", 1, {"pack": True}),
}


ONES = [way for way, (place, *_) in WAYS.items() if place == "auto 1"]
CASES = [
    *itertools.product(ONES, ("token", "sequence")), ("2 ranks", "token"), ("3 ranks, packed", "token"),
    ("2 ranks, accumulated 2, packed", "sequence"), ("3 ranks, accumulated 4", "sequence"),
]  # fmt: skip
QUICK = ("2 ranks, accumulated 2, packed", "sequence"), ("accumulated 4, sorted", "token")


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[dict[str, Tensor], dict[str, Tensor]]]:
    folder = tmp_path_factory.mktemp("known")
    return cache(lambda per: (formula(folder, per)[0], step(folder, loss_per=per)))


@pytest.mark.parametrize(("way", "per"), mostly_slow(CASES, *QUICK))
def test_a_batch_gives_one_gradient_however_it_is_cut(way: str, per: str, known: Any, tmp_path: Path) -> None:
    place, accumulated, options = WAYS[way]
    expected, reference = known(per)
    after = step(tmp_path, place, accumulated, loss_per=per, **options)
    assert_same({name: after[name] for name in expected}, expected, 1e-9)
    assert_same(after, reference, 1e-9)


@pytest.mark.parametrize(("option", "devices"), mostly_slow([("", 2), ("pack", 2), ("loss_per", 3)], ("pack", 2)))
def test_exact_gives_the_same_bits(option: str, devices: int, tmp_path: Path) -> None:
    options: dict[str, Any] = {option: "sequence" if option == "loss_per" else True} if option else {}
    assert_same(step(tmp_path, "ddp 1 exact 4", **options), step(tmp_path, f"ddp {devices} exact 4", **options))


def test_a_loss_is_the_formula(tmp_path: Path) -> None:
    for per in ("token", "sequence"):
        expected = formula(tmp_path, per)[1]
        for pack in (False, True):
            chat = data(tmp_path, loss_per=per, pack=pack)
            module = distillation(chat).double()
            (batch,) = chat.train_dataloader()
            loss, parts = module.shard_step(batch)
            assert parts["ce/loss"].sum().item() / batch.count == pytest.approx(expected, abs=1e-12)
            total = sum(parts[f"{name}/loss"].sum().item() for name in module.students) / batch.count
            assert loss.item() == pytest.approx(total, abs=1e-12)


def test_packed_rows_hold_each_text_once_and_whole(tmp_path: Path) -> None:
    chat = data(tmp_path, pack=True)
    texts = chat.split("train")
    (batch,) = chat.train_dataloader()
    assert len(batch.inputs) < 7
    assert batch.inputs.shape[1] == int(texts.lengths.max())
    found = []
    for row in range(len(batch.inputs)):
        assert batch.index[row] == batch.texts[row, 0]
        for place in batch.texts[row].unique_consecutive().tolist():
            where = batch.texts[row] == place
            begin = int(where.nonzero()[0])
            assert (batch.starts[row, where] == begin).all()
            if place >= 0:
                inputs, labels = texts.take(torch.tensor([place]))
                assert torch.equal(batch.inputs[row, where], inputs[0])
                assert torch.equal(batch.labels[row, where], labels[0])
                found.append(place)
            else:
                assert (batch.labels[row, where] == IGNORED).all()
    assert sorted(found) == list(range(12))


def test_packing_fills_rows() -> None:
    assert pack_texts([4]) == [[0]]
    assert pack_texts([1, 5, 2, 3, 4]) == [[1], [4, 0], [3, 2]]


def test_sorted_batches_have_texts_of_about_one_length_and_each_once(tmp_path: Path) -> None:
    chat = data(tmp_path, batch_size=5, sort_lengths=True)
    loader, lengths = chat.train_dataloader(), chat.split("train").lengths
    orders = []
    for epoch in range(3):
        loader.sampler.set_epoch(epoch)
        batches = [batch.index for batch in loader]
        assert [len(index) for index in batches] == [5, 5, 2]
        orders.append(torch.cat(batches).tolist())
        assert sorted(orders[-1]) == list(range(12))
        spans = sorted((int(lengths[index].min()), int(lengths[index].max())) for index in batches)
        assert all(high <= low for (_, high), (low, _) in itertools.pairwise(spans))
    assert orders[0] != orders[1]


def test_ranks_share_the_rows_of_a_batch(tmp_path: Path) -> None:
    for options in ({}, {"pack": True}):
        chat = data(tmp_path, **options)
        whole: Batch = next(iter(chat.train_dataloader()))
        shares = [
            next(iter(TextLoader(chat.split("train"), 12, chat._order(12), rank, 3, bool(options))))
            for rank in range(3)
        ]
        assert torch.equal(torch.cat([share.inputs for share in shares]), whole.inputs)
        assert {share.label_weight for share in shares} == {whole.label_weight}


@pytest.mark.parametrize("weights", [None, [1.0, 3.0]])
def test_several_teachers_keep_texts_apart(weights: list[float] | None, tmp_path: Path) -> None:
    """Their losses on packed rows are those of a row each."""
    losses = {}
    for pack in (False, True):
        chat = data(tmp_path, pack=pack)
        small: dict[str, Any] = {"num_layers": 1, "embed_dim": 8, **chat.net_arguments}
        teacher = Ensemble([gpt(**small, seed=seed) for seed in (1, 2)], weights)
        shapes: dict[str, Any] = {"input_shape": chat.input_shape, "num_classes": 256, "input_dtype": torch.int64}
        student = gpt(**small), Hinton()
        module = Distillation(teacher, {"kd": student}, task=Tokens(), **shapes).double()
        (batch,) = chat.train_dataloader()
        losses[pack] = module.shard_step(batch)[0].item()
    assert losses[True] == pytest.approx(losses[False], rel=1e-9)


def test_what_cannot_keep_texts_apart_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="Embedding, chosen by `student`, can't keep apart"):
        check_keeps_apart(torch.nn.Embedding(9, 8), "student")

    class Mixes(GPT):
        def forward(self, tokens: Tensor, starts: Tensor | None = None) -> Tensor:
            return super().forward(tokens)

    with pytest.raises(BadInput, match="mixes the texts"):
        check_keeps_apart(Mixes(9, 8), "student")
    chat = data(tmp_path, pack=True)
    module = distillation(chat)
    shapes: dict[str, Any] = {"input_shape": chat.input_shape, "num_classes": 256, "input_dtype": torch.int64}
    module = Distillation(module.teacher, {"cosine": (gpt(**chat.net_arguments), Cosine())}, task=Tokens(), **shapes)
    with pytest.raises(BadInput, match="compares whole texts"):
        module.check_data(PACKED)
    for options in ({"sort_lengths": True, "pack": True}, {"pack": True, "partition": [0.5, 0.5]}, {"loss_per": "row"}):
        with pytest.raises(BadInput):
            Chat("none", **options)
