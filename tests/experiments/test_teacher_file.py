"""`--teacher Outputs`: outputs in a file teach as the net that gave them, on any number of devices."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from apprentice.errors import BadInput
from apprentice.keyed import with_seed
from datamodules import Digits
from datamodules.adapter import DataModuleAdapter
from experiments import kd
from harness.runs.nets import load_net
from lit_modules.nets import FastText
from lit_modules.nets.embedder import TextEmbedder
from lit_modules.nets.output_file import outputs_of
from tests.commands import Refusal, nets, results, run_of
from tests.datamodules.test_adapter import Mine
from tests.texts_in_rows import read_rows, text_rows
from tests.training import assert_same

SIZES = ["--data", "Digits", "--data.train_size", "60", "--data.test_size", "40", "--seeds", "1"]
FIT = [*SIZES, "--data.batch_size", "16", "--trainer.max_epochs", "2", "--teacher_cache_mb", "64"]
save: Any = np.savez
PARTS = "train", "validation", "test"
live = run_of(kd, *FIT, "--teacher", "LightNN", "--only", "ce", "kd", "dist")


def digits(**options: Any) -> Digits:
    data = Digits(train_size=60, test_size=40, batch_size=16, **options)
    data.setup()
    return data


@torch.no_grad()
def entries(run: Path) -> dict[str, np.ndarray]:
    """What the run's teacher gives for all samples, in the reverse of their order."""
    data, net = digits(), load_net(run / "seed0" / "teacher")
    logits = [net(data.samples(part, torch.arange(data.sizes[part])).inputs) for part in PARTS]
    rows = [data.rows_of(part) for part in PARTS]
    parts = np.repeat(PARTS, [len(part) for part in rows])
    return {"logits": torch.cat(logits).numpy()[::-1], "row": torch.cat(rows).numpy()[::-1], "part": parts[::-1]}


def written(folder: Path, arrays: dict[str, np.ndarray], name: str = "teacher.npz") -> list[str]:
    save(folder / name, **arrays)
    return ["--teacher", "Outputs", "--teacher.file", str(folder / name)]


def test_students_learn_as_from_the_net_that_gave_the_outputs(live: Path, tmp_path: Path) -> None:
    kd.main([*FIT, *written(tmp_path, entries(live)), "--only", "ce", "kd", "dist", "--out", str(tmp_path / "run")])
    for name in ("ce", "kd", "dist"):
        assert_same(nets(tmp_path / "run", f"seed0/{name}"), nets(live, f"seed0/{name}"), atol=1e-6)
    was, now = results(live), results(tmp_path / "run")
    assert now["teacher"]["test_acc"] == was["teacher"]["test_acc"]
    assert now["teacher"]["fit_seconds"] == [None]
    assert now["students"]["kd"]["test_agreement"] == was["students"]["kd"]["test_agreement"]


@pytest.mark.parametrize("exact", [[], ["--exact", "4"]])
def test_two_processes_train_as_one(live: Path, tmp_path: Path, exact: list[str]) -> None:
    teacher = written(tmp_path, entries(live))
    precision = [] if exact else ["--trainer.precision", "64-true"]
    for devices in ("1", "2"):
        flags = ["--only", "kd", *exact, *precision, "--trainer.devices", devices, "--out", str(tmp_path / devices)]
        kd.main([*FIT, *teacher, *flags])
    assert_same(nets(tmp_path / "1"), nets(tmp_path / "2"), atol=0 if exact else 1e-9)


def test_without_test_entries_the_teacher_is_not_scored(live: Path, tmp_path: Path, capsys: Any) -> None:
    arrays = entries(live)
    of_train = {name: values[arrays["part"] != "test"] for name, values in arrays.items()}
    kd.main([*FIT, *written(tmp_path, of_train), "--only", "ce", "kd", "--out", str(tmp_path / "run")])
    assert "lacks samples of test: the teacher is not scored there" in capsys.readouterr().out
    assert results(tmp_path / "run")["teacher"]["test_acc"] == [None]
    row = next(line for line in (tmp_path / "run" / "results.md").read_text().splitlines() if "| teacher" in line)
    assert [cell.strip() for cell in row.split("|") if cell.strip()][:4] == ["teacher", "—", "0", "—"]
    assert_same(nets(tmp_path / "run", "seed0/kd"), nets(live, "seed0/kd"), atol=1e-6)
    flags = ["--resume", "true", "--only", "ce", "kd", "dist", "--out", str(tmp_path / "run")]
    kd.main(flags)
    assert_same(nets(tmp_path / "run", "seed0/dist"), nets(live, "seed0/dist"), atol=1e-6)


def test_embeddings_in_a_file_are_what_students_are_judged_beside(live: Path, tmp_path: Path) -> None:
    arrays = entries(live)
    teacher = written(tmp_path, {**arrays, "embeddings": arrays["logits"]} | {"logits": arrays["logits"]})
    flags = ["--data.task", "embedding", "--only", "untrained", "cosine", "rkd", "--out", str(tmp_path / "run")]
    kd.main([*FIT, *teacher, *flags])
    saved = results(tmp_path / "run")
    assert saved["teacher"]["test_neighbours"] == [1.0]
    assert 0 < saved["students"]["untrained"]["test_neighbours"][0] < 1
    assert saved["teacher"]["test_knn"][0] > 0.3


FAULTS = {
    "an entry for each train sample; none is for the row": lambda a: {k: v[a["part"] != "train"] for k, v in a.items()},
    "finite logits; entry 3": lambda a: {
        **a, "logits": np.where(np.arange(len(a["row"]))[:, None] == 3, np.nan, a["logits"])
    },
    "an entry for each sample once; row": lambda a: {k: np.concatenate([v, v[:1]]) for k, v in a.items()},
    "logits (n, 10), as the data has it": lambda a: {**a, "logits": a["logits"][:, :9]},
    "one of logits, probabilities, scores": lambda a: {"row": a["row"]},
    "those of Digits have no file_name": lambda a: {
        "logits": a["logits"], "file_name": np.arange(len(a["row"])).astype(str)
    },
    "probabilities from 0 to 1, of which each row adds up to 1": lambda a: {
        "probabilities": a["logits"], **a, "logits": 0
    },
}  # fmt: skip


@pytest.mark.parametrize("expected", FAULTS)
def test_what_is_wrong_in_a_file_is_one_line(live: Path, tmp_path: Path, refusal: Refusal, expected: str) -> None:
    arrays = {name: x for name, x in FAULTS[expected](entries(live)).items() if not isinstance(x, int)}
    assert expected in refusal(kd.main, *FIT, *written(tmp_path, arrays))


REFUSED = {
    "training samples that are the same in each epoch": ["--data.augment", "true"],
    "not allowed with --teacher Outputs, which has no weights": ["--teacher_ckpt", "x.pt"],
    "not allowed with --teacher Outputs, which has no layers to cut": ["--trainer.strategy", "pipeline"],
    "this one is a teacher, without weights": ["--student", "Outputs", "--student.file", "x"],
    "a layer of Outputs that objectives can compare": ["--only", "hint"],
}


@pytest.mark.parametrize("expected", REFUSED)
def test_what_a_file_can_not_teach_is_one_line(live: Path, tmp_path: Path, refusal: Refusal, expected: str) -> None:
    assert expected in refusal(kd.main, *FIT, *written(tmp_path, entries(live)), *REFUSED[expected])


def test_classes_are_matched_by_name_and_probabilities_are_logarithms(live: Path, tmp_path: Path) -> None:
    data, arrays = digits(), entries(live)
    order = np.roll(np.arange(10), 3)
    logits = torch.from_numpy(arrays["logits"].copy()).double()
    named = {"row": arrays["row"], "part": arrays["part"], "classes": np.array(data.class_names)[order]}
    save(tmp_path / "p.npz", probabilities=logits.softmax(1).numpy()[:, order], **named)
    save(tmp_path / "z.npz", **arrays)
    plain, _ = outputs_of(tmp_path / "z.npz", data, "classes", ["train"])
    found, note = outputs_of(tmp_path / "p.npz", data, "classes", ["train"])
    assert note == "its outputs are put into the order of the data's classes"
    for part in PARTS:
        expected = plain[part].double().softmax(1).clamp(min=1e-7).log()
        torch.testing.assert_close(found[part], expected, rtol=0, atol=1e-6)


@pytest.mark.extras("datasets")
def test_parquet_and_names_of_files(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    from datamodules import ImageFolder

    for name in ("a/1", "a/2", "a/3", "b/1", "b/2", "b/3"):
        path = tmp_path / "images" / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), color=(len(name), ord(name[0]), int(name[-1]) * 50)).save(path)
    data = ImageFolder(tmp_path / "images", test_size=2, validation_size=0, group_duplicates=False)
    data.setup()
    names = [f"{folder}/{number}.png" for folder in "ab" for number in "123"]
    columns = {"file_name": names, "logits": [[float(i), -float(i)] for i in range(6)]}
    parquet.write_table(pyarrow.table(columns), tmp_path / "t.parquet")
    found, _ = outputs_of(tmp_path / "t.parquet", data, "classes", ["train", "test"])
    for part in ("train", "test"):
        assert found[part][:, 0].tolist() == [
            float(names.index(name)) for name in data.names_of(part, "file_name") or ()
        ]


def test_samples_of_a_users_data_module_have_rows() -> None:
    data = DataModuleAdapter(Mine())
    data.setup()
    assert data.train_inputs_change  # its data set adds noise
    assert data.rows_of("train").tolist() == [*range(data.places)]


def test_texts_of_rows_have_embeddings_in_a_file(tmp_path: Path) -> None:
    data = read_rows(tmp_path, text_rows(40))
    net = with_seed(3, lambda: TextEmbedder(FastText(6, 32, input_shape=(9,)), data.input_shape))
    texts = sorted({text for part in PARTS for row in data.texts(part, range(data.sizes[part])) for text in row})
    longest = max(len(text.encode()) for text in texts)
    rows = torch.tensor([[*text.encode().ljust(longest, b"\0")] for text in texts], dtype=torch.uint8)
    with torch.no_grad():
        embeddings = net(rows[:, None])[:, 0].numpy()
        outputs, _ = outputs_of(_npz(tmp_path, embeddings=embeddings, text=texts), data, "scores", PARTS)
        for part in PARTS:
            expected = net(data.samples(part, torch.arange(data.sizes[part])).inputs)
            torch.testing.assert_close(outputs[part], expected, rtol=0, atol=1e-6)
    flags = ["--data", "Pairs", "--data.path", str(tmp_path / "rows.jsonl"), "--data.batch_size", "7", "--seeds", "1"]
    flags += ["--data.test_size", "12", "--data.validation_size", "5", "--trainer.max_epochs", "1"]
    flags += ["--student", "FastText", "--student.width", "6", "--student.buckets", "32", "--only", "cosine", "rkd"]
    kd.main([*flags, "--teacher", "Outputs", "--teacher.file", str(tmp_path / "t.npz"), "--out", str(tmp_path / "run")])
    assert {*results(tmp_path / "run")["students"]} == {"cosine", "rkd"}
    without = _npz(tmp_path, embeddings=embeddings)
    with pytest.raises(BadInput, match="a `text` for each entry, as a row of `data Pairs` has several"):
        outputs_of(without, data, "scores", PARTS)
    with pytest.raises(BadInput, match="an entry for each train sample; none is for the text"):
        outputs_of(_npz(tmp_path, embeddings=embeddings[:3], text=texts[:3]), data, "scores", PARTS)


def _npz(folder: Path, **arrays: Any) -> Path:
    save(folder / "t.npz", **arrays)
    return folder / "t.npz"
