"""Students with a teacher's weights and other attention, and their alignment: equalities, formulas, refusals."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from apprentice.errors import BadInput
from apprentice.keyed import with_seed
from datamodules import Text
from lit_modules.distillation import Distillation
from lit_modules.nets import GPT, HuggingFaceLM, LightNN, Mixer
from lit_modules.nets.attention.softmax import SelfAttention
from lit_modules.nets.layers import run
from lit_modules.objectives import Hinton, Linearize, Objective, Sum
from lit_modules.objectives.context import StepContext
from lit_modules.tasks import Tokens
from tests import with_transformers
from tests.grids import mostly_slow
from tests.language import gpt, text
from tests.language_parts import save_llama
from tests.training import assert_same, fit, net, on, weights

TEACHER: dict[str, Any] = {"position": "rotary", "num_heads": 2, "embed_dim": 8, "tie_weights": False}
MIXERS = "windowed", "linear", "gated", "delta"
TOKENS = torch.arange(3, 51).view(3, 16) * 5 % 11
LABELS = torch.where(TOKENS % 3 > 0, TOKENS.roll(-1, 1), -100)


def _teacher(**options: Any) -> GPT:
    return gpt(**TEACHER | options, seed=1).double().eval()


def _student(mixer: Mixer, teacher: torch.nn.Module) -> GPT:
    return with_seed(0, lambda: mixer.make(teacher, mixer.first(teacher)))


def _logits(student: torch.nn.Module) -> Tensor:
    with torch.no_grad():
        logits: Tensor = student(TOKENS)
    return logits


@pytest.mark.parametrize("options", [
    {}, {"num_kv_heads": 1}, {"position": "learned", "norm": "rms", "mlp": "swiglu"},
    {"bias": False, "qkv_bias": True, "rope_fraction": 0.5},
])  # fmt: skip
def test_with_a_window_as_long_as_the_text_a_student_is_its_teacher(options: dict[str, Any]) -> None:
    teacher = _teacher(**options)
    student = _student(Mixer("windowed", window=16), teacher)
    torch.testing.assert_close(_logits(student), _logits(teacher), rtol=0, atol=1e-12)
    whole, short = _student(Mixer("windowed", [0, 1, 2][1:], window=2), teacher), _student(Mixer(window=2), teacher)
    assert [isinstance(block.attention, SelfAttention) for block in whole.blocks] == [False, True, True]
    assert not torch.allclose(_logits(short), _logits(teacher), atol=1e-4)


@pytest.mark.parametrize("mixer", ["linear", "gated", "delta"])
def test_heads_that_share_a_key_get_one_each(mixer: Any) -> None:
    """The projections of a grouped teacher, repeated, are those of the same teacher with as many keys as queries."""
    grouped = _teacher(num_kv_heads=1)
    student = _student(Mixer(mixer), grouped)
    attention, x = grouped.blocks[0].attention, torch.randn(2, 5, 8, dtype=torch.float64)
    query, key, value = attention.qkv(x).split([8, 4, 4], -1)
    expected = torch.cat([query, key, key, value, value], -1)
    torch.testing.assert_close(student.blocks[0].attention.qkv(x), expected, rtol=0, atol=1e-12)
    assert student.init_args["position"] is None
    assert _student(Mixer(mixer, [1]), grouped).init_args["position"] == "rotary"


@pytest.mark.extras("transformers")
@with_transformers.in_fork
def test_a_llama_teacher_becomes_our_gpt(tmp_path: Path) -> None:
    save_llama(tmp_path, num_hidden_layers=2)
    teacher = HuggingFaceLM(str(tmp_path), 11, 16, pretrained=True).eval()
    student = _student(Mixer("windowed", window=16), teacher)
    torch.testing.assert_close(_logits(student), _logits(teacher), rtol=1e-4, atol=1e-5)
    module = Distillation(teacher, {"a": (student, Linearize())}, **_shapes(11))
    objective = module.students["a"].objective
    assert set(objective.teacher_layers.values()) == {
        f"model.model.layers.{n}.{layer}" for n in range(2) for layer in ("self_attn.q_proj<", "self_attn.o_proj")
    }
    gap = _gap(module, 0.0)
    assert gap.max() < 1e-9  # with a window of the whole text there is nothing to learn


@pytest.mark.extras("transformers")
@with_transformers.in_fork
def test_it_compares_what_attention_of_each_family_reads_and_writes(tmp_path: Path) -> None:
    import transformers

    sizes = {"vocab_size": 11, "hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4,
             "intermediate_size": 8, "num_hidden_layers": 2, "max_position_embeddings": 16}  # fmt: skip
    for family in ("Olmo2", "Gemma3Text"):
        config = getattr(transformers, f"{family}Config")(**sizes, pad_token_id=None)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / family)
        teacher = HuggingFaceLM(str(tmp_path / family), 11, 16, pretrained=True).eval()
        module = Distillation(teacher, {"a": (_student(Mixer("delta"), teacher), Linearize())}, **_shapes())
        compared = module.students["a"].objective.attention
        for block, paths in zip(GPT.from_hf(teacher.model).blocks, compared, strict=True):
            with torch.no_grad():
                read, written = (run(teacher, TOKENS, {*paths}).features[path] for path in paths)
            torch.testing.assert_close(block.attention(read), written, rtol=1e-4, atol=1e-5)


def test_blocks_with_other_positions_stay_at_their_places() -> None:
    """Gemma 3's: blocks with a window have another base."""
    teacher = _teacher(window=4, full_every=2, local_rope_base=20.0, norm="rms", unit_offset=True, qk_norm=True)
    student = _student(Mixer("delta", [0, 1]), teacher)
    assert [block.attention.position.base for block in student.blocks[:2]] == [20.0, 10000.0]
    x = torch.randn(2, 9, 8, dtype=torch.float64)
    for ours, theirs in zip(student.blocks[:2], teacher.blocks[:2], strict=True):
        torch.testing.assert_close(ours(x), theirs(x), rtol=0, atol=0)
    assert _student(Mixer("delta"), teacher).init_args["local_rope_base"] is None


def _shapes(classes: int = 11) -> dict[str, Any]:
    return {"input_shape": (16,), "num_classes": classes, "task": Tokens(), "input_dtype": torch.int64}


def _gap(module: Distillation, progress: float, name: str = "mixers") -> Tensor:
    """The term (b, T) of a phase."""
    student = module.students["a"]
    context = StepContext(progress=progress)
    with torch.no_grad():
        teacher = student.objective.adapt_teacher(
            module.outputs.ask(module.teacher, TOKENS, module.teacher_layers), context
        )
        terms = student.objective(student(TOKENS), teacher, LABELS.clamp(min=0), context)
    assert [*terms] == [name]
    return terms[name].values


def test_blocks_are_kept_by_the_divergence_that_replacing_them_costs() -> None:
    teacher, lines = _teacher(), list[str]()
    with torch.no_grad():
        teacher.blocks[0].attention.out.weight.zero_()  # so nothing is lost without it
        teacher.blocks[1].attention.out.weight.mul_(100)
    mixer = Mixer("linear", 1)
    plan = with_seed(0, lambda: mixer.choose(teacher, TOKENS, LABELS, lines.append))
    assert plan.softmax_layers == [1]
    assert plan.divergences is not None
    assert plan.divergences[0] < plan.divergences[2] < plan.divergences[1]
    assert [line.split(":")[0] for line in lines] == [f"measured {n} of 3 blocks" for n in (1, 2, 3)]
    assert str(plan).startswith("softmax in blocks 1; KL to the teacher with one block replaced: ")
    assert Mixer("linear").choose(teacher, TOKENS, LABELS) == ([], None)
    again = with_seed(0, lambda: mixer.choose(teacher, TOKENS, LABELS))
    assert again == plan
    assert isinstance(teacher.blocks[2].attention, SelfAttention)
    assert not any(p.grad is not None for p in teacher.parameters())


@pytest.mark.parametrize("mixer", MIXERS)
def test_phases_are_the_formulas(mixer: Any) -> None:
    """Each mixer on what the teacher's attention reads; maps by the outputs for values that are one-hot."""
    teacher = _teacher()
    student = _student(Mixer(mixer, window=2 if mixer == "windowed" else None), teacher)
    objective = Linearize(mixers_until=0.6, maps_until=0.3)
    module = Distillation(teacher, {"a": (student, objective)}, **_shapes()).double()
    states, maps, outputs = [], [], []
    x = teacher.embedding(TOKENS)
    with torch.no_grad():
        for ours, theirs in zip(student.blocks, teacher.blocks, strict=True):
            read = theirs.norm1(x)
            y, mixed = theirs.attention(read), ours.attention(read)
            states.append(read)
            outputs.append((mixed - y).square().mean(-1))
            gaps = ours.attention.weights(read) - theirs.attention.weights(read)
            maps.append(gaps.square().sum(-1).mean(1))
            x = x + y
            x = x + theirs.mlp(theirs.norm2(x))
    torch.testing.assert_close(_gap(module, 0.0, "maps"), torch.stack(maps).mean(0), rtol=0, atol=1e-7)
    torch.testing.assert_close(_gap(module, 0.3), torch.stack(outputs).mean(0), rtol=0, atol=1e-7)
    outputs = (
        module(TOKENS)[1]["a"],
        module.outputs.ask(module.teacher, TOKENS, module.teacher_layers),
        LABELS.clamp(min=0),
    )
    assert [*objective(*outputs, StepContext(progress=0.6))] == ["kd", "ce"]


def _distillation(data: Text, objective: Objective, **options: Any) -> Distillation:
    teacher = gpt(**data.net_arguments, seed=1, **TEACHER | options)
    student = _student(Mixer("windowed", [1], window=3), teacher)
    shape = {"input_shape": data.input_shape, "num_classes": data.num_classes, "input_dtype": torch.int64}
    return Distillation(teacher, {"a": (student, objective)}, **shape, task=Tokens(data.tokens_per_character))


def _ended(folder: Path, place: str = "auto 1", until: float = 0.5, **options: Any) -> Distillation:
    """After two epochs, of which the first aligns."""
    data = text(folder)
    module = _distillation(data, Sum([Linearize(until, until / 2)]))
    return fit(module, data, **{"precision": "64-true"} | on(place) | options)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Distillation:
    return _ended(tmp_path_factory.mktemp("alone"))


@pytest.mark.parametrize("place", mostly_slow(["ddp 2", "ddp 3", "fsdp 2"], "ddp 2", "fsdp 2"))
def test_float64_agrees_with_one_process(place: str, alone: Distillation, tmp_path: Path) -> None:
    assert_same(weights(alone), weights(_ended(tmp_path, place)), atol=1e-9)


@pytest.mark.slow
def test_exact_bits_are_those_of_one_process(tmp_path: Path) -> None:
    one, other = (weights(_ended(tmp_path, f"ddp {n} exact 6", precision="32-true")) for n in (1, 3))
    assert_same(one, other)


def test_alignment_changes_mixers_alone(tmp_path: Path) -> None:
    data = text(tmp_path)
    begun = _distillation(data, Linearize()).students["a"].net.state_dict()
    ended = _ended(tmp_path, until=1.0, precision="32-true").students["a"].net.state_dict()
    changed = {key for key in begun if not torch.equal(begun[key], ended[key])}
    of_mixers = {key for key in begun if ".attention." in key and not key.startswith("blocks.1.")}
    assert changed == of_mixers


@pytest.mark.parametrize(
    ("mixer", "teacher", "message"),
    [
        ({"mixer": "softmax"}, {}, "mixer softmax: expected one of windowed, linear, gated, delta"),
        ({"mixer": "linear", "window": 3}, {}, "window 3: expected null, or mixer=windowed"),
        ({"mixer": "gated", "feature_map": "elu"}, {}, "feature_map elu: expected null, or mixer=linear or windowed"),
        ({"softmax_layers": 3}, {}, "softmax_layers 3: expected 0 to 2 of the 3 blocks"),
        ({"softmax_layers": [1, 0]}, {}, r"softmax_layers \[1, 0\]: expected some blocks in their order"),
        ({"softmax_layers": [0, 1, 2]}, {}, r"softmax_layers \[0, 1, 2\]: expected some blocks"),
        ({"mixer": "linear"}, {"head_dim": 6}, "mixer linear: expected windowed for a teacher whose heads are 6 wide"),
        ({}, {"window": 4}, "mixer windowed: expected linear, gated or delta for a teacher that attends in windows"),
        ({}, {"position": "alibi"}, "mixer windowed: expected one that fits the teacher: position alibi"),
        ({"mixer": "gated"}, {"bias": False, "qkv_bias": True}, "expected windowed for a teacher whose queries, keys"),
        ({}, {"nope_every": 2}, "teacher.nope_every 2: expected null: a teacher with positions in all blocks"),
        ({}, {"mixer": "delta", "position": None}, "teacher.mixer delta: expected softmax"),
    ],
)
def test_what_cannot_be_replaced_is_one_line(mixer: Any, teacher: Any, message: str) -> None:
    made_by = _teacher(**teacher)
    with pytest.raises(BadInput, match=message):
        Mixer(**mixer).first(made_by)


def test_nets_that_do_not_fit_are_one_line() -> None:
    teacher, student = _teacher(), _student(Mixer(), _teacher())

    def refused(net: torch.nn.Module, objective: Objective, by: torch.nn.Module, message: str) -> None:
        with pytest.raises(BadInput, match=message):
            Distillation(by, {"a": (net, objective)}, **_shapes())

    refused(gpt(**TEACHER), Linearize(), teacher, r"variants.a.student GPT: expected `student Mixer`.*: all its blocks")
    refused(gpt(mixer="linear", num_layers=2), Linearize(), teacher, "a student with as many blocks as the teacher")
    refused(gpt(mixer="linear"), Linearize(), teacher, "tokens as wide as the teacher's 8, and not 12")
    refused(student, Linearize(), gpt(mixer="linear"), r"tokens as wide as the teacher.s 12")
    with pytest.raises(BadInput, match=r"maps_until 0.5: expected at most mixers_until, 0\.2"):
        Linearize(0.2, 0.5)
    with pytest.raises(BadInput, match=r"mixers_until 2.0: expected a share of the training"):
        Linearize(2.0)
    with pytest.raises(BadInput, match="teacher LightNN: expected GPT or HuggingFaceLM"):
        Mixer().first(net(LightNN))


def test_a_student_that_needs_no_alignment_learns_as_by_hinton(tmp_path: Path) -> None:
    data = text(tmp_path)
    one, other = (
        fit(_distillation(data, objective), data, precision="64-true")
        for objective in (Linearize(0.0), Hinton(1.0, 1.0, 0.0))
    )
    assert_same(weights(one), weights(other), atol=1e-12)
