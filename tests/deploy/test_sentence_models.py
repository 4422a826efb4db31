"""Folders of students that read texts: sentence-transformers loads them, and has their vectors and scores."""

from pathlib import Path

import pytest
import torch
import yaml

from datamodules.preparation import Preparation
from deploy.export_folder import TRANSFORMERS
from deploy.sentence_models import write_sentence_model
from harness.runs.nets import save_net
from lit_modules.nets import HuggingFaceReranker, HuggingFaceText, RNNClassifier
from lit_modules.nets.embedder import TextEmbedder
from lit_modules.nets.specs import to_plain
from tests import with_transformers
from tests.encoder_parts import TEXTS, as_bytes, save_encoder
from tests.net_facts import facts

pytestmark = pytest.mark.extras("transformers", "sentence_transformers")
FACTS = facts(classes=(), inputs=Preparation(kind="bytes", shape=(64,)))
ROWS = as_bytes(TEXTS)


def write(net: torch.nn.Module, folder: Path) -> Path | None:
    """Save a net as a run does and write its folder of sentence-transformers; None if it is not of such a kind."""
    save_net(net, to_plain(net), folder, FACTS)
    is_written = [write_sentence_model(folder) for _ in range(2)]  # a resumed run writes it again
    return folder / TRANSFORMERS if all(is_written) else None


@with_transformers.in_fork
def test_a_student_leaves_as_a_folder_with_its_vectors(folder: Path) -> None:
    from sentence_transformers import SentenceTransformer

    save_encoder(folder)
    net = HuggingFaceText(str(folder), True, "cls", True)
    held = TextEmbedder(net, (4, 9))
    for name, student in {"plain": net, "held": held, "wider": held.with_width(5)}.items():
        written = write(student, folder / name)
        vectors = torch.tensor(SentenceTransformer(str(written)).encode(TEXTS))
        torch.testing.assert_close(vectors, student.eval()(ROWS)[0].detach())
        card = (folder / name / TRANSFORMERS / "README.md").read_text()
        assert yaml.safe_load(card.split("---")[1])["pipeline_tag"] == "sentence-similarity"
    assert write(TextEmbedder(RNNClassifier(4, 4, num_classes=1), (4, 9)), folder / "bytes") is None


@with_transformers.in_fork
def test_a_student_that_ranks_leaves_as_a_folder_with_its_scores(folder: Path) -> None:
    from sentence_transformers import CrossEncoder

    save_encoder(folder)
    net = TextEmbedder(HuggingFaceReranker(str(folder), True, new_head=True), (4, 9)).eval()
    theirs = CrossEncoder(str(write(net, folder / "kd")), activation_fn=torch.nn.Identity())
    scores = theirs.predict([(TEXTS[0], text) for text in TEXTS[1:]])
    torch.testing.assert_close(torch.tensor(scores), net(ROWS)[0].detach())
