"""Students made of a teacher's weights: what is kept by hand, the choice against all choices, wrong options."""

import itertools
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from apprentice.errors import BadInput
from apprentice.keyed import with_seed
from lit_modules.nets import GPT, HuggingFaceLM, LightNN, Pruned
from lit_modules.nets.importance import Subset, TokenLoss, drop_blocks
from lit_modules.nets.pruned_weights import find_blocks
from tests import with_transformers
from tests.commands import bad_input
from tests.language_parts import save_llama, save_tokenizer

TOKENS = torch.arange(3, 51).view(3, 16) * 5 % 64
LABELS = torch.where(TOKENS % 3 > 0, TOKENS.roll(-1, 1), -100)


def _gpt(layers: int = 5) -> GPT:
    return with_seed(0, lambda: GPT(64, 16, layers, 2, 8)).double().eval()


def _loss(net: torch.nn.Module) -> float:
    with torch.no_grad():
        return F.cross_entropy(net(TOKENS).flatten(0, 1), LABELS.flatten(), ignore_index=-100).item()


@pytest.mark.parametrize("kept", [[0, 1, 2, 3, 4], [0, 2, 4], [1, 2], [4]])
def test_stored_outputs_give_the_loss_of_the_smaller_net(kept: list[int]) -> None:
    net = _gpt()
    path, _ = find_blocks(net)
    loss = TokenLoss(net, path, TOKENS, LABELS)
    for settled in ([0, 1, 2, 3, 4], [0, 2, 3, 4]):
        loss(settled)
        loss.settle(settled)
        smaller = Pruned(layers=kept).make(net, Pruned(layers=kept).first(net)).eval()
        assert loss(kept) == pytest.approx(_loss(smaller), abs=1e-6)  # it is measured in float32
    assert len(net.blocks) == 5


def test_blocks_are_dropped_one_by_one_where_the_loss_is_least() -> None:
    class Table:
        """The sum of weights of those that are left out, and more for neighbours."""

        unit = "{:.3f}"

        def __init__(self) -> None:
            self.settled: list[list[int]] = []
            self.calls = 0

        def __call__(self, kept: Sequence[int]) -> float:
            self.calls += 1
            out = [n for n in range(9) if n not in kept]
            return sum([5, 1, 2, 3, 4, 0.5, 2.5, 8, 9][n] for n in out) + sum(10 for n in out if n + 1 in out)

        def settle(self, kept: Sequence[int]) -> None:
            self.settled.append(list(kept))

    table = Table()
    assert drop_blocks(table, 9, 6) == ([0, 2, 4, 6, 7, 8], 4.5, 0)
    assert [len(kept) for kept in table.settled] == [9, 8, 7, 6]
    assert table.calls == 1 + 9 + 3 * 4


def test_the_first_drop_is_the_best_of_all() -> None:
    net = _gpt()
    kept = Pruned(layers=4).choose(net, TOKENS, LABELS)
    losses = {
        blocks: _loss(Pruned(layers=[*blocks]).make(net, Pruned(layers=[*blocks]).first(net)).eval())
        for blocks in itertools.combinations(range(5), 4)
    }
    assert tuple(kept.blocks) == min(losses, key=losses.__getitem__)
    assert kept.whole == pytest.approx(_loss(net))
    assert kept == Pruned(layers=4).choose(net, TOKENS, LABELS)
    whole = Pruned(layers=5)
    assert torch.equal(whole.make(net, whole.first(net)).eval()(TOKENS), net(TOKENS))


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({}, "layers None: expected a number of blocks, or `heads` or `mlp`: what to leave out"),
        ({"layers": 6}, "layers 6: expected 1 to 5 blocks, which the teacher has"),
        ({"layers": 0}, "layers 0: expected 1 to 5 blocks, which the teacher has"),
        ({"layers": [0, 5]}, "layers [0, 5]: expected blocks in their order, each once, from 0 to 4"),
        ({"layers": [2, 1]}, "layers [2, 1]: expected blocks in their order, each once, from 0 to 4"),
        ({"layers": []}, "layers []: expected blocks in their order, each once, from 0 to 4"),
        ({"mlp": 8}, "mlp 8: not allowed with GPT, of which whole blocks are kept or left out"),
        ({"lora_rank": 2, "layers": 1}, "lora_rank 2: expected 0 for a GPT, or a HuggingFaceLM as teacher"),
        ({"heads": 1}, "heads 1: not allowed with GPT, of which whole blocks are kept or left out"),
    ],
)  # fmt: skip
def test_what_the_teacher_has_not_is_refused(options: dict[str, Any], line: str) -> None:
    assert bad_input(lambda: Pruned(**options).first(_gpt())) == line


def test_teachers_of_other_kinds_are_refused() -> None:
    assert bad_input(Pruned(layers=1).first, LightNN((1, 8, 8))).startswith("teacher LightNN: expected HuggingFaceLM")


@pytest.mark.extras("transformers", "peft")
@with_transformers.in_fork
def test_a_llama_of_transformers(folder: Path) -> None:
    warnings.simplefilter("ignore")
    save_llama(folder / "hf", attention_bias=True, mlp_bias=True)
    net = HuggingFaceLM(str(folder / "hf"), 64, 16, pretrained=True).double().eval()
    for parameter in net.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(parameter.numel()))
    pruned = Pruned(layers=3, heads=2, mlp=10)
    kept = pruned.choose(net, TOKENS, LABELS)
    assert [len(kept.blocks), *map(len, kept.heads), *map(len, kept.channels)] == [3, 1, 1, 1, 10, 10, 10]
    smaller = pruned.make(net, kept).eval()
    config = smaller.model.config
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (2, 1, 4)

    # By hand: the whole net with zeros where heads and channels are left out.
    path, blocks = find_blocks(net)
    for place, number in enumerate(kept.blocks):
        heads = torch.zeros(2, 2, 4, dtype=torch.float64)
        heads[kept.heads[place]] = 1
        channels = torch.zeros(24, dtype=torch.float64)
        channels[kept.channels[place]] = 1
        blocks[number].self_attn.o_proj.weight.data *= heads.flatten()
        blocks[number].mlp.down_proj.weight.data *= channels
    left = torch.nn.ModuleList(blocks[number] for number in kept.blocks)
    net.get_submodule(path.rpartition(".")[0]).layers = left
    torch.testing.assert_close(smaller(TOKENS), net(TOKENS), rtol=1e-6, atol=1e-6)  # norms compute in float32

    again = HuggingFaceLM(**smaller.rebuild_arguments(smaller.init_args)).double().eval()
    again.load_state_dict(smaller.state_dict())
    assert torch.equal(again(TOKENS), smaller(TOKENS))
    net = HuggingFaceLM(str(folder / "hf"), 64, 16, pretrained=True)
    assert bad_input(Pruned(heads=3).first, net) == (
        "heads 3: expected 1 to 4 heads, a multiple of the 2 that share a key"
    )
    assert bad_input(Pruned(mlp=25).first, net) == "mlp 25: expected 1 to 24 channels, which the teacher's MLPs have"
    assert bad_input(HuggingFaceLM, str(folder / "hf"), 64, 16, config={"layers": 3}).startswith("config {'layers': 3}")
    assert bad_input(HuggingFaceLM, str(folder / "hf"), 64, 16, config={"num_attention_heads": 3}).endswith(
        "expected num_attention_heads that num_key_value_heads divides; 2 do not divide 3"
    )
    assert "not allowed with pretrained weights" in bad_input(
        HuggingFaceLM, str(folder / "hf"), 64, 16, pretrained=True, config={"num_hidden_layers": 3}
    )
    small = HuggingFaceLM(str(folder / "hf"), 64, 16, config={"num_hidden_layers": 2, "hidden_size": 8})
    assert small.model.get_input_embeddings().weight.shape == (300, 8)
    assert len(find_blocks(small)[1]) == 2


@pytest.mark.extras("transformers", "peft")
@with_transformers.in_fork
def test_a_gpt2_of_transformers(folder: Path) -> None:
    import transformers

    warnings.simplefilter("ignore")
    save_tokenizer(folder)
    config = transformers.GPT2Config(vocab_size=300, n_positions=32, n_embd=16, n_layer=4, n_head=2)
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    net = HuggingFaceLM(str(folder), 64, 16, pretrained=True).double().eval()
    for parameter in net.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(parameter.numel()))
    pruned = Pruned(layers=[0, 2, 3], mlp=20)
    kept = pruned.choose(net, TOKENS, LABELS)
    assert kept.blocks == [0, 2, 3]
    smaller = pruned.make(net, kept).eval()
    _, blocks = find_blocks(net)
    for place, number in enumerate(kept.blocks):
        channels = torch.zeros(64, 1, dtype=torch.float64)
        channels[kept.channels[place]] = 1
        blocks[number].mlp.c_proj.weight.data *= channels
    net.model.transformer.h = torch.nn.ModuleList(blocks[number] for number in kept.blocks)
    torch.testing.assert_close(smaller(TOKENS), net(TOKENS), rtol=1e-9, atol=1e-9)
    assert bad_input(Pruned(heads=1).first, net) == "heads 1: expected a teacher of Llama's kind; GPT2Config is not"


@pytest.mark.extras("transformers", "peft")
@with_transformers.in_fork
def test_places_of_blocks_of_transformers(folder: Path) -> None:
    """Settings of single blocks go with them; blocks that compute by their place, and other layers, are refused."""
    import transformers

    warnings.simplefilter("ignore")
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4}
    sizes |= {"num_attention_heads": 2, "max_position_embeddings": 32, "pad_token_id": None}
    heads = {"num_key_value_heads": 1, "bos_token_id": 0, "eos_token_id": 1}
    neo = {"attention_types": [[["global", "local"], 2]], "window_size": 2}
    scaled = transformers.GPT2Config(
        vocab_size=64, n_positions=32, n_embd=16, n_layer=4, n_head=2, scale_attn_by_inverse_layer_idx=True
    )
    configs = {
        "smollm3": transformers.SmolLM3Config(**sizes, **heads, no_rope_layers=[1, 0, 1, 0]),
        "neo": transformers.GPTNeoConfig(vocab_size=64, hidden_size=16, num_layers=4, num_heads=2, **neo),
        "starcoder2": transformers.Starcoder2Config(**sizes, **heads),
        "qwen2": transformers.Qwen2Config(**sizes, **heads),
        "olmo2": transformers.Olmo2Config(**sizes, **heads, head_dim=8),
        "gemma3": transformers.Gemma3TextConfig(
            **sizes, **heads, head_dim=8, sliding_window_pattern=2, sliding_window=4
        ),
        "scaled": scaled,
    }
    nets = {}
    for name, config in configs.items():
        config.save_pretrained(folder / name)
        nets[name] = HuggingFaceLM(str(folder / name), 64, 16).double().eval()
        for parameter in nets[name].parameters():
            torch.nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(parameter.numel()))
    pruned = Pruned(layers=[1, 2])
    for name in ("smollm3", "neo", "starcoder2", "qwen2", "olmo2", "gemma3"):
        smaller = pruned.make(nets[name], pruned.first(nets[name])).eval()
        path, blocks = find_blocks(nets[name])
        if name == "gemma3":  # its model reads the kind at the place where a block stands
            nets[name].model.config.layer_types = ["full_attention", "sliding_attention"] * 2
        with Subset(nets[name], path, [blocks[1], blocks[2]]):
            torch.testing.assert_close(smaller(TOKENS), nets[name](TOKENS), rtol=1e-6, atol=1e-6)
        smaller.model.save_pretrained(folder / f"{name}-small")
        assert transformers.AutoConfig.from_pretrained(folder / f"{name}-small").num_hidden_layers == 2
    assert bad_input(pruned.make, nets["scaled"], pruned.first(nets["scaled"])) == (
        "layers [1, 2]: expected all blocks: those of this GPT2LMHeadModel compute something else at other places"
    )
    for name in ("neo", "starcoder2"):
        assert "a teacher whose blocks have the MLP of Llama or GPT-2" in bad_input(Pruned(mlp=8).first, nets[name])
    assert bad_input(Pruned(heads=1).first, nets["qwen2"]) == (
        "heads 1: expected a teacher whose configuration has head_dim; Qwen2Config has none"
    )
    assert bad_input(Pruned(heads=2).first, nets["olmo2"]) == (
        "heads 2: expected all 2 heads: this teacher norms them together"
    )
    adapted = HuggingFaceLM(str(folder / "qwen2"), 64, 16, lora_rank=2)
    assert bad_input(pruned.first, adapted).startswith("teacher.lora_rank 2: expected 0")


def test_blocks_of_a_hybrid_keep_their_kinds() -> None:
    net = with_seed(0, lambda: GPT(64, 16, 4, 2, 8, mixer="delta", softmax_layers=[1, 3], position="rotary")).eval()
    pruned = Pruned(layers=[0, 3])
    student = pruned.make(net, pruned.first(net))
    assert student.init_args["softmax_layers"] == [1]
    with Subset(net, "blocks", [net.blocks[0], net.blocks[3]]), torch.no_grad():
        torch.testing.assert_close(student(TOKENS), net(TOKENS))
    alone = Pruned(layers=[0, 2])
    with pytest.raises(BadInput, match=r"layers .*: expected others: with these alone position rotary is refused"):
        alone.make(net, alone.first(net))
