"""Hidden states and relations of attention of texts (TinyBERT, MiniLM) against formulas in float64."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from apprentice.batch import IGNORED, Batch
from apprentice.errors import BadInput
from lit_modules.distillation import Distillation
from lit_modules.nets import DeepNN, HuggingFaceLM, LightNN, Pruned
from lit_modules.nets.pruned_weights import Kept
from lit_modules.objectives import AttentionScores, HiddenStates, MiniLM, Objective, Sum
from lit_modules.tasks import Tokens
from tests import with_transformers
from tests.attention import parts
from tests.language import PACKED, gpt
from tests.training import SHAPE, net

B, T, V = 3, 8, 11
SHAPES: dict[str, Any] = {"input_shape": (T,), "num_classes": V, "task": Tokens(), "input_dtype": torch.int64}


def module(objective: Objective, heads: int = 2, teacher_layers: int = 4) -> Distillation:
    teacher = gpt(V, T, seed=1, num_layers=teacher_layers, embed_dim=16, num_heads=2)
    student = gpt(V, T, num_layers=2, embed_dim=8, num_heads=heads)
    return Distillation(teacher, {"r": (student, objective)}, **SHAPES).double()


def batch() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    tokens, labels = (torch.randint(V, (B, T), generator=g) for _ in range(2))
    labels[0, :3], labels[1] = IGNORED, IGNORED
    return tokens, labels


def relation(a: Tensor, b: Tensor) -> Tensor:
    scores = a @ b.mT / a.shape[-1] ** 0.5
    return scores.masked_fill(torch.ones(T, T).triu(1).bool(), float("-inf")).softmax(-1)


def check(made: Distillation, formula: Any) -> None:
    """The loss and its gradients, those of tokens that count over their number."""
    tokens, labels = batch()
    loss = made.losses(made(tokens), Batch.of((tokens, labels), 0))[0]
    counted, student = labels >= 0, made.students["r"].net
    values, ce_weight = formula(student, made.teacher, tokens)  # (b, T)
    ce = nn.functional.cross_entropy(student(tokens)[counted], labels[counted])
    expected = values[counted].mean() + ce_weight * ce
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    parameters = [*made.students["r"].parameters()]
    for ours, theirs in zip(*(torch.autograd.grad(x, parameters) for x in (loss, expected)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("heads", [None, 4])
def test_minilm_is_the_papers_formula_of_the_last_blocks(heads: int | None) -> None:
    def formula(student: nn.Module, teacher: nn.Module, tokens: Tensor) -> tuple[Tensor, float]:
        s, t = (parts(model, tokens, heads or 2)[-1] for model in (student, teacher))
        total = torch.zeros(B, T, dtype=torch.float64)
        for weight, (a, b) in {2.0: (0, 1), 3.0: (2, 2), 0.5: (0, 0), 0.25: (1, 1)}.items():
            p, q = relation(t[a], t[b]).detach(), relation(s[a], s[b])
            divergence = torch.where(p > 0, p * (p.clamp(min=1e-300) / q.clamp(min=1e-300)).log(), 0.0).sum(-1)
            total = total + weight * divergence.mean(1)
        return total, 0.7

    check(module(MiniLM(2.0, 3.0, 0.5, 0.25, 0.7, relation_heads=heads), 2 if heads is None else 1), formula)


def test_attention_scores_are_the_formula_of_tinybert() -> None:
    def formula(student: nn.Module, teacher: nn.Module, tokens: Tensor) -> tuple[Tensor, float]:
        ours, theirs = parts(student, tokens), parts(teacher, tokens)
        values = torch.zeros(B, T, dtype=torch.float64)
        for m, (query, key, _) in enumerate(ours):
            q, k, _ = theirs[2 * m + 1]
            gap = (query @ key.mT / 2 - (q @ k.mT / 8**0.5).detach()).square().mean(1)
            for place in range(T):
                values[:, place] = values[:, place] + gap[:, place, : place + 1].mean(-1) / 2
        return values * 1.5, 0.3

    check(module(AttentionScores(1.5, 0.3)), formula)


def test_hidden_states_are_the_formula_of_tinybert() -> None:
    made = module(HiddenStates(2.0, 0.5))

    def formula(student: nn.Module, teacher: nn.Module, tokens: Tensor) -> tuple[Tensor, float]:
        values, theirs = torch.zeros(B, T, dtype=torch.float64), states(teacher, tokens)
        for m, (h, layer) in enumerate(
            zip(states(student, tokens), made.students["r"].objective.projections, strict=True)
        ):
            gap = h @ layer.weight.mT - theirs[2 * m + 1].detach()  # blocks 2 and 4 of 4
            values = values + gap.square().mean(2)
        return values, 0.5

    check(made, formula)


def states(model: nn.Module, tokens: Tensor) -> list[Tensor]:
    x = model.embedding(tokens)
    return [x := block(x) for block in model.blocks]


def test_layers_are_mapped_by_name_or_evenly_and_others_are_refused() -> None:
    named = HiddenStates(student_stages=["blocks.0"], teacher_stages=["blocks.3"])
    module(named)
    assert named.teacher_layers == {"teacher_stages.0": "blocks.3"}
    module(even := HiddenStates(), teacher_layers=3)
    assert [*even.teacher_layers.values()] == ["stage1", "stage3"]
    with pytest.raises(BadInput, match=r"^variants\.a\.student_stages\.0 \S+: expected a layer that gives tokens of"):
        Distillation(net(DeepNN), {"a": (net(LightNN), HiddenStates())}, input_shape=SHAPE)


@pytest.mark.extras("transformers")
@with_transformers.in_fork
def test_blocks_of_hugging_face_models_are_their_stages(tmp_path: Path) -> None:
    import transformers

    size = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = transformers.LlamaConfig(vocab_size=V, num_hidden_layers=3, max_position_embeddings=T, **size)
    config.save_pretrained(tmp_path)
    teacher = HuggingFaceLM(str(tmp_path), V, T)
    assert teacher.stages == ("model.model.layers.0", "model.model.layers.1", "model.model.layers.2")
    made = Distillation(teacher, {"h": (gpt(V, T, num_layers=2), HiddenStates())}, **SHAPES)
    tokens = torch.arange(2 * T).view(2, T) % V
    assert made.losses(made(tokens), Batch.of((tokens, tokens), 0))[0].isfinite()


def test_padding_and_other_texts_change_nothing() -> None:
    made = module(Sum([MiniLM(ce_weight=0.0), AttentionScores(ce_weight=0.0), HiddenStates(ce_weight=0.0)]))
    tokens, labels = batch()
    whole = made.losses(made(tokens), Batch.of((tokens, labels), 0))[0]
    longer, more = (nn.functional.pad(x, (0, 0, 0, 1), value=fill) for x, fill in ((tokens, 3), (labels, IGNORED)))
    torch.testing.assert_close(made.losses(made(longer), Batch.of((longer, more), 0))[0], whole, rtol=1e-12, atol=0)
    changed = tokens.clone()
    changed[0, 3:], changed[2, 0] = tokens[0, 3:], (tokens[2, 0] + 1) % V  # an earlier token is attended to
    assert made.losses(made(changed), Batch.of((changed, labels), 0))[0] != whole
    with pytest.raises(BadInput, match=r"^variants\.r Sum: expected an objective that compares tokens one by one"):
        made.check_data(PACKED)


def test_other_nets_and_heads_are_refused_in_one_line() -> None:
    with pytest.raises(
        BadInput, match=r"^variants\.r\.relation_heads None: expected a number of heads, as the student"
    ):
        module(MiniLM(), heads=4)
    with pytest.raises(
        BadInput, match=r"^variants\.r\.relation_heads 3: expected a divisor of 8, the width of the stu"
    ):
        module(MiniLM(relation_heads=3))
    with pytest.raises(BadInput, match=r"^relation_heads 0: expected a number of heads"):
        AttentionScores(relation_heads=0)
    with pytest.raises(BadInput, match=r"^variants\.r\.student_stages\.0 head: expected a block of GPT, of a Hugg"):
        module(MiniLM(student_stages=["head"], teacher_stages=["blocks.3"]))
    with pytest.raises(BadInput, match=r"^variants\.a\.student_stages\.0 \S+: expected a block of GPT, of a Hugging"):
        Distillation(net(DeepNN), {"a": (net(LightNN), MiniLM())}, input_shape=SHAPE)


@pytest.mark.extras("transformers")
@pytest.mark.parametrize("kind", ["llama", "llama3", "qwen", "gpt2"])
@with_transformers.in_fork
def test_attention_of_hugging_face_models_is_their_own(kind: str, tmp_path: Path) -> None:
    import transformers

    size = {"vocab_size": V, "num_hidden_layers": 3, "max_position_embeddings": 32}
    grouped = {"hidden_size": 16, "intermediate_size": 8, "num_attention_heads": 4, "num_key_value_heads": 2}
    scaled = {"rope_type": "llama3", "rope_theta": 100.0, "factor": 8.0, "low_freq_factor": 1.0}
    scaled |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8}
    config = {
        "llama": lambda: transformers.LlamaConfig(**size, **grouped),
        "llama3": lambda: transformers.LlamaConfig(**size, **grouped, rope_parameters=scaled),
        "qwen": lambda: transformers.Qwen3Config(**size, **grouped, head_dim=8),
        "gpt2": lambda: transformers.GPT2Config(vocab_size=V, n_layer=3, n_head=4, n_embd=16, n_positions=32),
    }[kind]()
    config.save_pretrained(tmp_path)
    torch.manual_seed(0)
    teacher = HuggingFaceLM(str(tmp_path), V, T)
    for parameter in teacher.parameters():  # attention of initial weights is nearly even
        torch.nn.init.normal_(parameter, std=0.5)
    objective = AttentionScores(student_stages=["stage1"], teacher_stages=["stage3"])
    made = Distillation(teacher, {"r": (gpt(V, T, num_layers=1, embed_dim=8, num_heads=4), objective)}, **SHAPES)
    tokens, _ = batch()
    teacher.model.set_attn_implementation("eager")
    theirs = teacher.model(tokens, output_attentions=True).attentions[2]
    scores = made(tokens)[0].condensed["r", "attention.0"].transpose(1, 2)
    ours = scores.masked_fill(torch.ones(T, T).triu(1).bool(), float("-inf")).softmax(-1)
    assert theirs.std() > 0.1
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.extras("transformers")
@pytest.mark.parametrize("deviation", [None, 0.5])
@with_transformers.in_fork
def test_attention_of_another_form_is_refused(deviation: float | None, tmp_path: Path) -> None:
    """That of a new model, too, whose scores are nearly even: it has other rotations."""
    import transformers

    size = {"hidden_size": 16, "intermediate_size": 8, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = transformers.CohereConfig(vocab_size=V, num_hidden_layers=1, max_position_embeddings=32, **size)
    config.save_pretrained(tmp_path)
    torch.manual_seed(0)
    other = HuggingFaceLM(str(tmp_path), V, T)
    for parameter in other.parameters() if deviation else ():
        torch.nn.init.normal_(parameter, std=deviation)
    student = gpt(V, T, num_layers=1, embed_dim=8, num_heads=2)
    with pytest.raises(BadInput, match=r"teacher_stages\.0 stage-1: expected .*; attention of this one is of another"):
        Distillation(other, {"r": (student, MiniLM())}, **SHAPES)


def test_a_pruned_student_learns_from_what_its_next_block_reads_in_the_teacher() -> None:
    teacher = gpt(V, T, seed=1, num_layers=5, embed_dim=16)
    for method in (HiddenStates, AttentionScores):
        student = Pruned([0, 1, 4]).make(teacher, Kept([0, 1, 4]))
        Distillation(teacher, {"r": (student, objective := method())}, **SHAPES)
        if method is HiddenStates:
            assert [*objective.teacher_layers.values()] == ["stage1", "stage4", "stage5"]
        else:
            assert [*objective.teacher_layers.values()] == [f"blocks.{i}.attention.qkv" for i in (0, 3, 4)]
