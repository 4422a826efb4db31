"""A text as data: read as it stands, cut into blocks by seed and epoch, held out as a whole."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from apprentice.errors import BadInput
from datamodules import Text, Vocabulary
from datamodules.text import plain_text as module
from tests.commands import bad_input
from tests.language import text, written


def strings(data: Text, tokens: torch.Tensor) -> list[str]:
    return [data.vocabulary.decode(row) for row in tokens]


def test_a_sample_is_a_block_and_its_labels_are_one_later(tmp_path: Path) -> None:
    data, whole = text(tmp_path), written(tmp_path, 555).read_text()
    train = data.split("train")
    assert train.inputs.shape == train.labels.shape == (442, 8)
    assert train.inputs.untyped_storage().nbytes() == 450  # bytes, once, for both
    taken = train.take(torch.tensor([3, 0, 441]))
    assert strings(data, taken.inputs) == [whole[3:11], whole[:8], whole[441:449]]
    assert strings(data, taken.labels) == [whole[4:12], whole[1:9], whole[442:450]]
    assert torch.equal(taken.inputs, train.inputs[[3, 0, 441]].long())
    assert torch.equal(taken.labels, train.labels[[3, 0, 441]].long())
    assert data.net_arguments == {"vocab_size": len(set(whole)), "block_size": 8}
    assert data.example.equal(torch.zeros(2, 8, dtype=torch.int64))
    assert data.sizes == {"train": 450, "validation": 48, "test": 55}


@pytest.mark.parametrize("characters", [500, 491, 200, 2000])
def test_held_out_each_token_is_predicted_once(characters: int, tmp_path: Path) -> None:
    path = written(tmp_path, characters)
    data, whole = Text(path, 8), path.read_text()
    cut = characters * 9 // 10
    begin = cut - round(0.1 * cut)
    for loader, part in ((data.val_dataloader(), whole[begin:cut]), (data.test_dataloader(), whole[cut:])):
        batches = list(loader)
        inputs, labels = (torch.cat([getattr(batch, name) for batch in batches]) for name in ("inputs", "labels"))
        counted = labels != -100
        assert counted[:-1].all()
        assert "".join(data.vocabulary.decode(row[mask]) for row, mask in zip(labels, counted, strict=True)) == part[1:]
        for row, label in zip(inputs, labels, strict=True):
            assert torch.equal(row[1:][label[:-1] != -100].long(), label[:-1][label[:-1] != -100])
    assert data.sizes == {"train": begin, "validation": cut - begin - 1, "test": characters - cut - 1}


KINDS = {"characters": {}, "bytes": {"vocabulary": "bytes"}, "a count": {"validation_size": 30}}


@pytest.mark.parametrize("kind", KINDS)
def test_no_token_is_in_two_parts_and_the_test_is_the_last_tenth_whatever_validates(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text("".join(map(chr, range(0x100, 0x100 + 400))))  # no character twice
    data, without = Text(path, 8, **KINDS[kind]), Text(path, 8, **KINDS[kind] | {"validation_size": 0})
    content = path.read_bytes() if kind == "bytes" else path.read_text()
    cut = len(content) * 9 // 10
    size = KINDS[kind].get("validation_size", round(0.1 * cut))
    blocks = [data.split(part) for part in ("validation", "test")]
    read = [
        data.split("train").text,
        *(torch.cat([each.inputs[:1, 0], each.labels[each.labels >= 0]]) for each in blocks),
    ]
    assert [len(tokens) for tokens in read] == [cut - size, size, len(content) - cut]
    whole = bytes(torch.cat(read).tolist()) if kind == "bytes" else data.vocabulary.decode(torch.cat(read))
    assert whole == content
    assert torch.equal(without.split("train").text, torch.cat(read[:2]).to(without.split("train").text.dtype))
    for tested, other in zip(without.split("test"), data.split("test"), strict=True):
        assert torch.equal(tested, other)
    assert without.sizes["validation"] == 0
    assert not list(without.val_dataloader())


def starts(data: Text, epoch: int) -> list[list[int]]:
    loader = data.train_dataloader()
    loader.sampler.set_epoch(epoch)
    return [batch.index.tolist() for batch in loader]


def test_an_epoch_cuts_the_text_into_blocks_from_a_place_of_its_own(tmp_path: Path) -> None:
    data = text(tmp_path)
    shifts = set()
    for epoch in range(20):
        batches = starts(data, epoch)
        assert [len(batch) for batch in batches] == [13, 13, 13, 13, 3]
        places = sorted(itertools.chain(*batches))
        shift = places[0]
        assert places == list(range(shift, shift + 55 * 8, 8))
        assert 0 <= shift < 8
        assert places[-1] + 8 < 450
        assert starts(data, epoch) == batches
        shifts.add(shift)
    assert len(shifts) > 4
    data.order_seed = 1
    assert starts(data, 0) != starts(text(tmp_path), 0)


@pytest.mark.parametrize("characters", [90, 93, 97, 170])
def test_every_block_of_a_short_text_fits(characters: int, tmp_path: Path) -> None:
    data = Text(written(tmp_path, characters), 8, validation_size=0)
    tokens = characters * 9 // 10
    for epoch in range(12):
        places = sorted(itertools.chain(*starts(data, epoch)))
        assert len(places) == (tokens - 8) // 8
        assert max(places) + 8 < tokens


def test_characters_and_bytes(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text("naïve €uro 漢字 " * 20)
    characters, bytewise = Text(path, 4), Text(path, 4, "bytes")
    for data in (characters, bytewise):
        data.setup()
    assert characters.vocabulary.characters == "".join(sorted(set("naïve €uro 漢字 ")))
    assert (characters.num_classes, bytewise.num_classes) == (len(set("naïve €uro 漢字 ")), 256)
    content = path.read_bytes()
    held_out = content[len(content) * 9 // 10 :]
    training = content[: len(bytewise._tokens["train"])]
    rates = {part: len(x) / len(x.decode(errors="replace")) for part, x in (("train", training), ("test", held_out))}
    assert bytewise.tokens_per_character == bytewise.tokens_per_character | rates
    assert len({*bytewise.tokens_per_character.values()}) == 3
    assert bytes(bytewise.split("train").inputs[5].tolist()) == content[5:9]
    assert {*characters.tokens_per_character.values()} == {1}
    path.write_bytes(bytes(range(256)) * 2)
    anything = Text(path, 4, "bytes")
    assert anything.split("train").inputs[100].tolist() == [100, 101, 102, 103]


def test_more_than_256_characters(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text("".join(map(chr, range(0x4E00, 0x4E00 + 700))))
    data = Text(path, 4)
    assert data.split("train").take(torch.tensor([300])).labels.tolist() == [[301, 302, 303, 304]]
    assert data.num_classes == 700


def test_a_vocabulary_there_and_back() -> None:
    for vocabulary in (Vocabulary("hello €"), Vocabulary()):
        assert vocabulary.decode(vocabulary.encode("hole €")) == "hole €"
        assert len(vocabulary.encode("")) == 0
    assert Vocabulary("ba").encode("abba").tolist() == [0, 1, 1, 0]
    assert Vocabulary().decode(torch.tensor([226, 130])) == "�"
    assert (Vocabulary("b\na").start, Vocabulary("ba").start, Vocabulary().start) == ("\n", "a", "\n")
    line = bad_input(lambda: Vocabulary("hello").encode("hellö wörld", "sample"))
    assert line.startswith("sample 'hellö wörld': expected the 4 characters that were trained on;")
    assert line.endswith("unknown: ' ' 'd' 'r' 'w' 'ö'")


def test_the_default_is_pythons_own_documentation() -> None:
    data = Text()
    data.setup()
    assert data.sizes["train"] > 100_000
    assert "assert" in data.vocabulary.decode(data.split("train").inputs[::64].flatten())


@pytest.mark.real_data
def test_tiny_shakespeare_is_split_as_is_the_custom(data_root: Path) -> None:
    data = Text(data_root / "tinyshakespeare" / "input.txt")
    assert data.num_classes == 65
    assert data.sizes == {"train": 903_469, "validation": 100_384, "test": 111_539}
    assert data.vocabulary.decode(data.split("train").inputs[0])[:14] == "First Citizen:"
    data = Text(data_root / "tinyshakespeare" / "input.txt", validation_size=0)
    assert data.sizes == {"train": 1_003_854, "validation": 0, "test": 111_539}


BAD: dict[str, tuple[bytes | None, dict[str, Any], str]] = {
    "absent": (None, {}, "data.path {path}: expected a file of text (No such file"),
    "empty": (b"", {}, "data.path {path}: expected a file of text; this one is empty"),
    "undecodable": (
        b"abc\xff" * 50,
        {},
        "data.path {path}: expected text in UTF-8; byte 3 is not. `data.vocabulary b",
    ),
    "short": (b"abcd" * 20, {}, "data.block_size 8: expected fewer tokens than the 8 of the text's last tenth"),
    "no block": (b"abcd" * 90, {"block_size": 0}, "data.block_size 0: expected a whole number of tokens, at least 1"),
    "half a block": (b"abcd" * 90, {"block_size": 8.5}, "data.block_size 8.5: expected a whole number of tokens"),
    "vocabulary": (b"abcd" * 90, {"vocabulary": "byte"}, "data.vocabulary byte: expected characters or bytes"),
    "no room to validate": (
        b"abcd" * 22,
        {},
        "data.validation_size 0.1: expected 0, or more than a block of 8 tokens, with two blocks left to train on",
    ),
    "all validates": (b"abcd" * 90, {"validation_size": 400}, "data.validation_size 400: expected 0, or more than"),
    "too little": (b"abcd" * 90, {"validation_size": 8}, "data.validation_size 8: expected 0, or more than"),
    "no share": (b"abcd" * 90, {"validation_size": 1.5}, "data.validation_size 1.5: expected a count"),
    "no batch": (b"abcd" * 90, {"batch_size": 0}, "data.batch_size 0: expected a whole number of at least 1"),
}


@pytest.mark.parametrize("kind", BAD)
def test_what_is_no_text_is_refused(kind: str, tmp_path: Path) -> None:
    content, options, message = BAD[kind]
    path = tmp_path / "text"
    if content is not None:
        path.write_bytes(content)
    assert bad_input(lambda: Text(path, **{"block_size": 8} | options).setup()).startswith(message.format(path=path))


def test_a_text_too_large_for_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "available_bytes", lambda: 1000)
    with pytest.raises(BadInput, match="a text that fits in memory"):
        text(tmp_path)


def test_a_folder_is_no_text(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=rf"data.path {tmp_path}: expected a file of text"):
        Text(tmp_path).setup()
