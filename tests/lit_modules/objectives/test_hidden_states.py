"""Hidden states of language models, layer by layer, against the formula in float64; by the command's module."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from apprentice.batch import IGNORED, Batch
from apprentice.errors import BadInput
from lit_modules.distillation import Distillation
from lit_modules.nets import DeepNN, HuggingFaceLM, LightNN
from lit_modules.objectives import HiddenStates
from lit_modules.tasks import Tokens
from tests import with_transformers
from tests.language import gpt
from tests.training import SHAPE, net

B, T, V = 3, 8, 11


def module(objective: HiddenStates, teacher_layers: int = 4) -> Distillation:
    shapes: dict[str, Any] = {"input_shape": (T,), "num_classes": V, "task": Tokens(), "input_dtype": torch.int64}
    teacher = gpt(V, T, seed=1, num_layers=teacher_layers, embed_dim=16)
    return Distillation(teacher, {"h": (gpt(V, T, num_layers=2), objective)}, **shapes).double()


def states(model: nn.Module, tokens: Tensor) -> list[Tensor]:
    x = model.embedding(tokens)
    return [x := block(x) for block in model.blocks]


def test_equals_the_formula_of_tinybert_and_its_gradients() -> None:
    made = module(HiddenStates(2.0, 0.5))
    g = torch.Generator().manual_seed(0)
    tokens, labels = (torch.randint(V, (B, T), generator=g) for _ in range(2))
    labels[0, :3], labels[1] = IGNORED, IGNORED
    loss = made.losses(made(tokens), Batch.of((tokens, labels), 0))[0]
    student, theirs = made.students["h"], states(made.teacher, tokens)
    expected, count = torch.zeros(()), int((labels >= 0).sum())
    for m, (h, layer) in enumerate(zip(states(student.net, tokens), student.objective.projections, strict=True)):
        gap = h @ layer.weight.mT - theirs[2 * m + 1].detach()  # blocks 2 and 4 of 4
        expected = expected + 2.0 * gap.square().mean(2)[labels >= 0].sum() / count / 2
    expected = expected + 0.5 * nn.functional.cross_entropy(student.net(tokens)[labels >= 0], labels[labels >= 0])
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    parameters = [*student.parameters()]
    for ours, formula in zip(*(torch.autograd.grad(x, parameters) for x in (loss, expected)), strict=True):
        torch.testing.assert_close(ours, formula, rtol=1e-10, atol=1e-12)


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
    shapes: dict[str, Any] = {"input_shape": (T,), "num_classes": V, "task": Tokens(), "input_dtype": torch.int64}
    made = Distillation(teacher, {"h": (gpt(V, T, num_layers=2), HiddenStates())}, **shapes)
    tokens = torch.arange(2 * T).view(2, T) % V
    assert made.losses(made(tokens), Batch.of((tokens, tokens), 0))[0].isfinite()
