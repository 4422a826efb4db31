"""GPT with a family's settings computes what transformers does, and its weights go both ways bit for bit."""

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from apprentice.keyed import with_seed
from deploy.as_transformers import as_transformers
from lit_modules.nets import GPT
from tests import with_transformers
from tests.commands import bad_input

pytestmark = pytest.mark.extras("transformers")
SIZES: dict[str, Any] = {
    "vocab_size": 60, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 24,
    "max_position_embeddings": 32, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 500.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 500.0, "original_max_position_embeddings": 16}
LOCAL = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 500.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 20.0},
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"num_key_value_heads": 2}),
    "llama of biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama 3": ("Llama", {"num_key_value_heads": 1, "rope_parameters": LLAMA3, "head_dim": 8}),
    "llama of yarn": ("Llama", {"rope_parameters": YARN, "rms_norm_eps": 1e-3}),
    "gpt2": ("GPT2", {"n_positions": 32, "n_inner": 24}),
    "gpt2 of gelu": ("GPT2", {"n_positions": 32, "activation_function": "gelu", "tie_word_embeddings": False}),
    "mistral": ("Mistral", {"num_key_value_heads": 2, "sliding_window": 4}),
    "qwen3": ("Qwen3", {"num_key_value_heads": 2, "head_dim": 6, "rms_norm_eps": 1e-3}),
    "qwen3 of windows": (
        "Qwen3", {"num_key_value_heads": 2, "use_sliding_window": True, "sliding_window": 3, "max_window_layers": 3,
                  "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}),
    "gemma2": (
        "Gemma2", {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 6,
                   "final_logit_softcapping": 3.0, "attn_logit_softcapping": 2.0}),
    "gemma3": (
        "Gemma3Text", {"num_key_value_heads": 2, "head_dim": 8, "hidden_size": 24, "sliding_window": 4,
                       "query_pre_attn_scalar": 6, "final_logit_softcapping": 3.0, "rope_parameters": LOCAL,
                       "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}),
    "gemma3 of one base": (
        "Gemma3Text", {"num_key_value_heads": 1, "head_dim": 4, "sliding_window": 4, "query_pre_attn_scalar": 8,
                       "rope_parameters": {"full_attention": YARN, "sliding_attention": YARN}}),
    "olmo2": ("Olmo2", {"num_key_value_heads": 2, "rms_norm_eps": 1e-3, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2", {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "qwen2 of windows": (
        "Qwen2", {"num_key_value_heads": 4, "use_sliding_window": True, "sliding_window": 3, "max_window_layers": 0}),
    "phi3": ("Phi3", {"num_key_value_heads": 2, "sliding_window": 4}),
    "phi4 mini": (
        "Phi3", {"num_key_value_heads": 1, "hidden_size": 32, "tie_word_embeddings": True,
                 "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.75}}),
    "smollm3": ("SmolLM3", {"num_key_value_heads": 2, "no_rope_layer_interval": 2}),
    "mixtral": ("Mixtral", {"num_key_value_heads": 2, "num_local_experts": 3, "num_experts_per_tok": 2}),
    "qwen3 of experts": (
        "Qwen3Moe", {"num_key_value_heads": 2, "head_dim": 6, "moe_intermediate_size": 20, "num_experts": 5,
                     "num_experts_per_tok": 3}),
    "qwen3 of renormalised experts": (
        "Qwen3Moe", {"num_key_value_heads": 4, "head_dim": 4, "moe_intermediate_size": 20, "num_experts": 4,
                     "num_experts_per_tok": 2, "norm_topk_prob": True}),
}  # fmt: skip


SAME_AS_MISTRAL = "phi3"  # a Phi-3 whose whole heads turn


def make(case: str, dtype: torch.dtype = torch.float64) -> Any:
    """A tiny random model, with weights so large that each part of it matters."""
    import transformers

    name, options = CASES[case]
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **options})
    implementation = "eager" if name == "Gemma2" else "sdpa"
    torch.manual_seed(0)
    kernels = {"attn_implementation": implementation, "experts_implementation": "eager"}  # its others take no float64
    model = transformers.AutoModelForCausalLM.from_config(config, **kernels)
    for key, p in model.named_parameters():
        torch.nn.init.normal_(p, mean=float("norm" in key or "ln_" in key) / 2, std=0.3)
    return model.to(dtype).eval()


@contextmanager
def wide() -> Iterator[None]:
    """Inside, transformers computes norms, angles and softmax in the model's type, not in float32."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "float", lambda x: x)
        to = torch.Tensor.to

        def keep(x: Tensor, *args: Any, **options: Any) -> Tensor:
            narrows = torch.float32 in (*args, options.get("dtype")) and x.dtype == torch.float64
            return x if narrows else to(x, *args, **options)

        patch.setattr(torch.Tensor, "to", keep)
        softmax = torch.nn.functional.softmax
        patch.setattr(torch.nn.functional, "softmax", lambda x, dim, dtype=None: softmax(x, dim))
        yield


@with_transformers.in_fork
def test_logits_and_losses() -> None:
    warnings.simplefilter("ignore")
    tokens = torch.arange(40).view(2, 20) * 7 % 60
    for case in CASES:
        model = make(case)
        net = GPT.from_hf(model)
        assert not net.training
        gradients: dict[str, list[Tensor]] = {}
        logits = net(tokens)
        logits.square().mean().backward()
        ours = {key: p.grad for key, p in net.named_parameters()}
        for casts, tolerance in ((True, 5e-6), (False, 1e-10)):
            gradients.clear()
            model.zero_grad()
            if casts:
                theirs = model(tokens).logits
                theirs.square().mean().backward()
            else:
                with wide():
                    precise(model)
                    theirs = model(tokens).logits
                    theirs.square().mean().backward()
            scale = float(theirs.abs().max())
            torch.testing.assert_close(logits, theirs, rtol=0, atol=tolerance * scale, msg=case)
            copy = GPT.from_hf(with_gradients(model))
            for key, p in copy.named_parameters():
                torch.testing.assert_close(ours[key], p.data, rtol=0, atol=tolerance * max(scale**2, 1), msg=case + key)
        with torch.no_grad(), wide():
            decoder = net.decoder(20, None)
            steps = [decoder(tokens[:, :7]), *(decoder(tokens[:, i : i + 1]) for i in range(7, 20))]
            torch.testing.assert_close(torch.stack(steps, 1), theirs[:, 6:], rtol=0, atol=1e-10 * scale)
            past = model(tokens[:, :7], use_cache=True)
            after = model(tokens[:, 7:8], past_key_values=past.past_key_values, use_cache=True).logits
            torch.testing.assert_close(steps[1], after[:, 0], rtol=0, atol=1e-10 * scale)


def precise(model: Any) -> None:
    """Give the model's rotary positions frequencies, and its embeddings their factor, in float64."""
    mixers = [block.attention for block in GPT.from_hf(model).blocks]
    for module in model.modules():
        if hasattr(module, "scalar_embed_scale"):
            module.embed_scale = torch.tensor(module.scalar_embed_scale, dtype=torch.float64)
        for name, buffer in [*module.named_buffers(recurse=False)]:
            if name.endswith("inv_freq"):
                is_full = name.startswith("full")
                position = next(x.position for x in mixers if not (is_full and x.window))
                setattr(module, name, position.frequencies(2 * len(buffer)))


def with_gradients(model: Any) -> Any:
    """The model with its gradients in place of its weights."""
    import copy

    other = copy.deepcopy(model)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        q.data = p.grad.clone()
    return other


@with_transformers.in_fork
def test_weights_go_both_ways(folder: Path) -> None:
    import transformers

    warnings.simplefilter("ignore")
    for case in CASES:
        model = make(case, torch.float32)
        model.save_pretrained(folder / case)
        net = GPT.from_hf(folder / case)
        net.save_pretrained(folder / f"{case} again")
        again = transformers.AutoModelForCausalLM.from_pretrained(folder / f"{case} again").eval()
        tokens = torch.arange(9)[None]
        if case == SAME_AS_MISTRAL:
            assert type(again).__name__ == "MistralForCausalLM"
            torch.testing.assert_close(again(tokens).logits, model.eval()(tokens).logits)
            continue
        assert type(again) is type(model), case
        state = model.state_dict()
        assert all(torch.equal(value, state[key]) for key, value in again.state_dict().items()), case
        theirs, ours = model.config.to_dict(), again.config.to_dict()
        free = {"architectures", "layer_types", "max_window_layers", "transformers_version", "_name_or_path", "dtype"}
        free |= {
            "original_max_position_embeddings",
            "head_dim",
            "n_inner",
            "intermediate_size",
            "use_cache",
            "initializer_range",
        }
        differing = {key: (theirs[key], ours.get(key)) for key in theirs.keys() - free if theirs[key] != ours.get(key)}
        differing = {key: pair for key, pair in differing.items() if "token_id" not in key}
        assert not differing, (case, differing)
        rebuilt = GPT(**net.init_args).eval()
        rebuilt.load_state_dict(net.state_dict())
        assert torch.equal(rebuilt(tokens), net(tokens))


@with_transformers.in_fork
def test_what_gpt_has_not_is_refused(folder: Path) -> None:
    import transformers

    warnings.simplefilter("ignore")
    net = GPT(11, 16, 1, 2, 8, window=4)
    assert bad_input(net.save_pretrained, folder).startswith("window 4: expected that of a family of transformers (")
    assert as_transformers(net) is None
    for options in ({"mixer": "delta"}, {"mlp": "moe"}, {"gate": True}, {"position": "alibi"}, {"norm_place": "post"}):
        assert "family of transformers" in bad_input(GPT(11, 16, 1, 2, 8, **options).save_pretrained, folder)
    gemma: dict[str, Any] = {
        "position": "rotary", "norm": "rms", "norm_place": "sandwich", "unit_offset": True, "scale_embedding": True,
        "mlp": "geglu", "bias": False,
    }  # fmt: skip
    GPT(11, 16, 1, 2, 8, scale=12**-0.5, **gemma).as_transformers()
    message = bad_input(GPT(11, 16, 1, 2, 8, scale=0.3, **gemma).as_transformers)
    assert message.endswith("the nearest, gemma2, differs in scale")
    small = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    for kind, options, message in (
        ("Llama", {"hidden_act": "relu"}, "model.config.hidden_act relu: expected silu"),
        ("Llama", {"attention_bias": True}, "model.config.mlp_bias False: expected True"),
        ("Qwen3", {"attention_bias": True, "num_key_value_heads": 2, "head_dim": 4},
         "model.config.attention_bias True: expected False"),
        ("Gemma2", {"attention_bias": True, "num_key_value_heads": 2, "head_dim": 4},
         "model.config.attention_bias True: expected False"),
        ("Gemma3Text", {"attn_logit_softcapping": 2.0}, "model.config.attn_logit_softcapping 2.0: expected None"),
        ("Gemma3Text", {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
         "model.config.rope_parameters.sliding_attention {"),
        ("Olmo2", {"attention_bias": True}, "model.config.attention_bias True: expected False"),
        ("Llama", {"rope_parameters": {"rope_theta": 10.0, "partial_rotary_factor": 0.5}},
         "model.config.rope_parameters.partial_rotary_factor 0.5: expected 1"),
        ("OPT", {"ffn_dim": 8, "word_embed_proj_dim": 8}, "model opt: expected a model of a family that GPT knows"),
        ("Qwen3", {"layer_types": ["full_attention", "sliding_attention"], "num_hidden_layers": 2, "head_dim": 4,
                   "use_sliding_window": True, "sliding_window": 4, "num_key_value_heads": 2},
         "model.config.layer_types ["),
        ("Llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "rope_scaling"),
    ):  # fmt: skip
        config = getattr(transformers, f"{kind}Config")(**{**small, "vocab_size": 11, **options})
        model = transformers.AutoModelForCausalLM.from_config(config)
        assert bad_input(GPT.from_hf, model).startswith(message), (kind, options, bad_input(GPT.from_hf, model))
    assert bad_input(GPT.from_hf, str(folder / "nothing")).startswith("name ")


@with_transformers.in_fork
def test_the_pages_examples(folder: Path) -> None:
    """The page's examples print what it says."""
    warnings.simplefilter("ignore")
    printed: list[str] = []
    names = {"print": lambda *values: printed.append(" ".join(map(str, values)))}
    page = (Path(__file__).parents[3] / "docs" / "attention-nets.md").read_text()
    for code in re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
        exec(compile(code, "attention-nets.md", "exec"), names)
    assert printed[0] == "torch.Size([2, 10, 65]) torch.Size([2, 15])"
    assert printed[2].startswith("window 8: expected its default with mixer=linear")
    assert printed[-3:] == ["True", "True", "3 x 4 patches and 5 before them"]


def test_first_weights_and_names_are_what_they_were() -> None:
    net = with_seed(0, lambda: GPT(11, 16, 2, 2, 8))
    assert len(net.state_dict()) == 29
    total = float(sum(p.detach().double().abs().sum() for p in net.parameters()))
    assert total == pytest.approx(62.2439478, rel=1e-6)
