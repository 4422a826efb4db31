"""The model card of an exported net, as the Hugging Face hub lays it out: what, from what, how good, at what cost."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml

from apprentice.errors import BadInput
from deploy.export_folder import LABELS, ONNX, PROGRAM, USE, WEIGHTS, ExportedFile
from deploy.net_path import NetPath, net_path
from harness.reports.bakeoff.notes import notes
from harness.reports.bakeoff.objectives import objectives
from harness.reports.bakeoff.table import table
from harness.reports.measures import COST, PARAMETERS, STEP
from harness.reports.results import Results, averaged_key, load_results
from harness.reports.settings import settings
from harness.reports.tables import count
from harness.runs import environment
from harness.runs.facts import NetFacts
from harness.runs.nets import read_spec

# Names of tasks on the hub.
PIPELINES = {"images": "image-classification", "bytes": "text-classification"}
EMBEDDING_PIPELINES = {"images": "image-feature-extraction"}
METRICS = {"test_acc": "accuracy", "test_f1": "f1"}  # names of metrics there; others have ours
TEACHER = "teacher"
USE_ASSISTANT = """## Use

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model, tokenizer = AutoModelForCausalLM.from_pretrained("FOLDER"), AutoTokenizer.from_pretrained("FOLDER")
chat = [{"role": "user", "content": "TEXT"}]
inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
answer = model.generate(**inputs, max_new_tokens=64)[0, inputs["input_ids"].shape[1] :]
print(tokenizer.decode(answer, skip_special_tokens=True))
```

It has learned to answer in this template; other texts are not what it was trained on."""
USE_LANGUAGE_MODEL = """## Use

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model, tokenizer = AutoModelForCausalLM.from_pretrained("FOLDER"), AutoTokenizer.from_pretrained("FOLDER")
inputs = tokenizer("TEXT", return_tensors="pt", add_special_tokens=False)
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=64)[0]))
```"""
USE_LLAMA_CPP = """With llama.cpp, by the script of its repository, if that knows the family and the tokenizer:

```bash
python llama.cpp/convert_hf_to_gguf.py FOLDER
```"""
USE_SENTENCE_MODEL = """## Use

```python
from sentence_transformers import SentenceTransformer

print(SentenceTransformer("FOLDER").encode(["TEXT"]))
```"""
USE_RERANKER = """## Use

```python
from sentence_transformers import CrossEncoder

print(CrossEncoder("FOLDER").predict([("QUERY", "TEXT")]))
```"""
AVERAGED = ", moving average of weights"


def model_card(folder: Path, facts: NetFacts, parameters: int) -> str:
    """Write the card of the net in a run's folder; without results of the run the card says so."""
    path = net_path(folder)
    return _card(folder, facts, parameters, _head(path, facts, _results(path.run)), _use(facts))


def language_card(
    folder: Path, facts: NetFacts, parameters: int, *, has_encoder: bool, has_known_tokens: bool, answers: bool
) -> str:
    """Write the card of a language model in a run's folder, as transformers reads it.

    Whether it `has_encoder`, has the tokens of a published tokenizer (llama.cpp refuses others), and `answers` chats.
    """
    tags = ["knowledge-distillation", "pytorch", "safetensors"]
    pipeline = "text2text-generation" if has_encoder else "text-generation"
    head = {"library_name": "transformers", "tags": tags, "pipeline_tag": pipeline}
    use = USE_ASSISTANT if answers else USE_LANGUAGE_MODEL
    if has_encoder:  # its decoder gives the answer alone
        use = use.replace("CausalLM", "Seq2SeqLM").replace(', inputs["input_ids"].shape[1] :', "")
    return _card(folder, facts, parameters, head, [use, *[USE_LLAMA_CPP] * has_known_tokens])


def sentence_card(folder: Path, facts: NetFacts, parameters: int, ranks: bool) -> str:
    """Write the card of a net that embeds or ranks texts, in a run's folder, as sentence-transformers reads it."""
    tags = ["knowledge-distillation", "pytorch", "safetensors", "sentence-transformers"]
    pipeline = "text-ranking" if ranks else "sentence-similarity"
    head = {"library_name": "sentence-transformers", "tags": tags, "pipeline_tag": pipeline}
    return _card(folder, facts, parameters, head, [USE_RERANKER if ranks else USE_SENTENCE_MODEL])


def _card(folder: Path, facts: NetFacts, parameters: int, head: dict[str, Any], use: Iterable[str]) -> str:
    path = net_path(folder)
    results, name = _results(path.run), path.name
    net = str(read_spec(folder)["class_path"]).rpartition(".")[2]
    parts = [
        f"---\n{yaml.safe_dump(head, sort_keys=False, allow_unicode=True)}---",
        f"# {name}: {net}{AVERAGED * path.is_average}" + (f" on {results.data['name']}" if results else ""),
        _lead(name, net, facts, parameters, results),
        *use,
        *(_of_results(path, results) if results else ["## Results\n\nThe run left no table of results."]),
        "## Made by\n\n" + "\n".join(f"- {line}" for line in _made_by(facts, path.run)),
    ]
    return "\n\n".join(parts) + "\n"


def _results(run: Path) -> Results | None:
    """Read the results of a comparison of students; None where the run has others, or is not finished."""
    try:
        return Results.read(load_results(run))
    except (BadInput, LookupError, TypeError):
        return None


def _head(path: NetPath, facts: NetFacts, results: Results | None) -> dict[str, Any]:
    """Return what the hub reads."""
    pipelines = {"classification": PIPELINES, "embedding": EMBEDDING_PIPELINES}.get(facts.task, {})
    pipeline = pipelines.get(facts.inputs.kind)
    head: dict[str, Any] = {"library_name": "onnx", "tags": ["knowledge-distillation", "pytorch", "safetensors"]}
    if pipeline:
        head["pipeline_tag"] = pipeline
    score = _score(path, results) if results else None
    if results and pipeline and score is not None:
        metric, data = results.metric, results.data["name"]
        kind = METRICS.get(metric.name, metric.score)
        head["metrics"] = [kind]
        name = metric.title.partition(",")[0]  # without its unit: the value is a share
        scores = {"type": kind, "name": name, "value": score}
        task, of = {"type": pipeline}, {"name": data, "type": data.lower()}
        head["model-index"] = [{"name": path.name, "results": [{"task": task, "dataset": of, "metrics": [scores]}]}]
    return head


def _score(path: NetPath, results: Results) -> float | None:
    """Return the test metric of this seed's net."""
    number, key = path.seed.removeprefix("seed"), results.metric.name
    key = averaged_key(results.metric) if path.is_average else key
    scores = results.nets[path.name].scores.get(key, ()) if path.name in results.nets else ()
    if not number.isdecimal() or int(number) not in results.seeds:
        return None
    return dict(zip(results.seeds, scores, strict=True)).get(int(number))


def _lead(name: str, net: str, facts: NetFacts, parameters: int, results: Results | None) -> str:
    what = {"images": "images", "bytes": "texts"}.get(facts.inputs.kind, "inputs")
    is_teacher = name.partition("-")[0] == TEACHER  # also of several, such as teacher-big
    how = "was trained as a teacher" if is_teacher else "is a student of a comparison of distillation methods"
    learnt = f", by {objectives(results)[name]}" if results and name in results.students else ""
    kinds = {"tokens": "texts", **dict.fromkeys(("embedding", "retrieval"), f"embeddings of {what}")}
    for_what = kinds.get(facts.task, f"{what} of {len(facts.classes)} classes")
    article = "An" if net[0] in "AEIOU" else "A"
    return f"{article} {net} of {count(parameters)} parameters for {for_what}. It {how}{learnt}."


def _use(facts: NetFacts) -> Iterator[str]:
    argument = {"images": "IMAGE", "bytes": "TEXT"}.get(facts.inputs.kind, "INPUTS.npy")
    yield f"## Use\n\n```bash\npip install numpy onnxruntime pillow\npython {USE.name} {argument}\n```"
    shape = " × ".join(map(str, facts.inputs.shape))
    lines = [f"inputs: {shape}" + ("" if facts.inputs.kind != "images" else ", channels first, on a scale from 0 to 1")]
    if facts.inputs.kind == "images":
        lines += [f"mean: {[*facts.inputs.mean]}", f"standard deviation: {[*facts.inputs.std]}"]
        lines += ["resized so that the image just covers the size, then cropped at the centre"]
    names = ", ".join(facts.classes[:20]) + f" and {len(facts.classes) - 20} more" * (len(facts.classes) > 20)
    lines += [f"classes: {names} (`{LABELS.name}`)"] if facts.classes else []
    lines += [f"{_file(ONNX)}; {_file(PROGRAM)}", _file(WEIGHTS)]
    yield "\n".join(f"- {line}" for line in lines)


def _file(file: ExportedFile) -> str:
    return f"`{file.name}`: {file.content}"


def _of_results(path: NetPath, results: Results) -> Iterator[str]:
    data, metric, name = results.data, results.metric, path.name
    sizes = [f"{count(data[part])} {part}" for part in ("train", "validation", "test") if data.get(part) is not None]
    yield f"## Data\n\n{data['name']}: {', '.join(sizes)} {metric.counted}."
    learnt = objectives(results).get(name)
    method = [f"Method: {learnt}." if learnt else "It was trained with labels alone."]
    method += [f"Settings: {'; '.join(settings(results.config, results.free))}."]
    yield "## Method\n\n" + "\n\n".join(method)
    score = _score(path, results)
    of_this = ""
    if score is not None:
        title, _, unit = metric.title.partition(", ")
        of_this = f"This net, of {path.seed}: {title} {metric.scale * score:.{metric.digits}f} {unit}".rstrip() + "."
    row = results.students.get(name)
    interval = ""
    if not path.is_average and row is not None and row.delta_vs_ce is not None and name != row.baseline:
        spread = ", with its 95 % interval over seeds" if row.delta_vs_ce["low"] is not None else ""
        interval = f"Difference to {row.baseline}{spread}: {metric.difference(row.delta_vs_ce)} {metric.unit}."
    plural = "s" if len(results.seeds) > 1 else ""
    seeds = f"All nets of the run, of seed{plural} {', '.join(map(str, results.seeds))}:"
    yield "## Results\n\n" + "\n\n".join(
        part for part in (of_this, interval, seeds, table(results).markdown(), *notes(results)) if part
    )
    if name in results.nets:
        figures = [results.nets[name].with_means()]
        costs = (figure.column(figures) for figure in (PARAMETERS, STEP, COST))
        lines = [f"- {title}: {values[0]}" for title, values in costs]
        yield "## Cost\n\n" + "\n".join([*lines, f"- hardware: {results.hardware.get('cpu')}"])


def _made_by(facts: NetFacts, run: Path) -> Iterator[str]:
    yield from (f"`{command}`" for command in environment.commands(run))
    yield f"commit {facts.commit or 'unknown'}"
    yield ", ".join(f"{name} {version}" for name, version in facts.versions.items())
