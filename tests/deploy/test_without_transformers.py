"""Who has no transformers hears of it where the texts are theirs, and nothing in a run of embedded ones."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from apprentice.extras import Missing
from datamodules import Vocabulary
from deploy import language_models
from harness.studies.text.vocabularies import write_vocabularies


@pytest.mark.parametrize("path", [None, "chat.jsonl"])
def test_a_missing_extra_is_said_of_ones_own_texts(
    path: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(extra: str, *_: str) -> None:
        raise Missing("", extra, "it installed")

    monkeypatch.setattr(language_models, "need", missing)
    (tmp_path / "seed0" / "kd").mkdir(parents=True)
    data = SimpleNamespace(vocabulary=Vocabulary(), task="tokens", path=path)
    run: Any = SimpleNamespace(data=data, out=tmp_path, config=SimpleNamespace(seeds=[0]))
    write_vocabularies(run, ["teacher", "kd"])
    language_models.write_language_models(run, ["kd"], {})
    assert ("no hf/ of students" in capsys.readouterr().out) is (path is not None)
    assert (tmp_path / "seed0" / "kd" / "vocabulary.json").is_file()
