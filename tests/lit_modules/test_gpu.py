"""On a GPU: attention kernels are the formula, each student has its loss scale, all methods can be exact."""

import math
import warnings
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor
from torch.amp import GradScaler
from torch.nn import functional as F

from apprentice.errors import BadInput
from harness.studies import zoo
from lit_modules import objectives
from lit_modules.distillation import Distillation
from lit_modules.nets import ResNet, ViT
from lit_modules.nets.attention.form import Backend
from lit_modules.nets.attention.kernels import use_kernel
from lit_modules.objectives import CrossEntropy
from strategies import DDP
from tests.gpus import on_gpu
from tests.lit_modules.training.test_loss_scale import Loud, Scales, company
from tests.training import SHAPE, assert_same, digits, fit, net, weights

# By type, the kernels that torch has for it, and the error of outputs and gradients over the largest of each
KERNELS: dict[torch.dtype, tuple[tuple[Backend, ...], float]] = {
    torch.float64: (("auto", "math"), 1e-12),
    torch.float32: (("auto", "math", "efficient"), 1e-5),
    torch.float16: (("auto", "math", "flash", "efficient", "cudnn"), 5e-3),
    torch.bfloat16: (("auto", "math", "flash", "efficient", "cudnn"), 4e-2),
}
VIT = {"patch_size": 4, "embed_dim": 16, "num_heads": 2, "num_layers": 1, "distillation_token": True}
pytestmark = pytest.mark.gpu


def attended(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """softmax(q kᵀ / √d) v of (B, heads, T, d)."""
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    return scores.softmax(-1) @ v


def is_the_formula(dtype: torch.dtype, backend: Backend) -> None:
    for causal in (False, True):
        drawn = torch.randn(4, 2, 3, 200, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
        found: list[Sequence[Tensor]] = []
        for like in (drawn.double(), drawn.cuda()):
            *heads, grad = like.unbind()
            heads = [x.detach().clone().requires_grad_() for x in heads]
            if like.is_cuda:
                with use_kernel(backend, *heads, None, 0.0, causal):
                    y = F.scaled_dot_product_attention(*heads, is_causal=causal)
            else:
                y = attended(*heads, causal)
            found.append([y, *torch.autograd.grad(y, heads, grad)])
        for formula, ours in zip(*found, strict=True):
            error = (ours.cpu().double() - formula).abs().max() / formula.abs().max()
            assert error < KERNELS[dtype][1], (causal, error)


@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")  # torch's, of a fork whose first product is backward
@pytest.mark.parametrize(("dtype", "backend"), [(dtype, b) for dtype, (known, _) in KERNELS.items() for b in known])
def test_attention_is_the_formula(dtype: torch.dtype, backend: Backend, tmp_path: Path) -> None:
    on_gpu(tmp_path, is_the_formula, dtype, backend)


def refuses() -> None:
    heads = [torch.zeros(1, 1, 8, 64, device="cuda") for _ in range(3)]
    with pytest.raises(BadInput, match="backend flash: expected a kernel that serves attention of float32 dense"):  # noqa: SIM117
        with use_kernel("flash", *heads, None, 0.0, False):
            F.scaled_dot_product_attention(*heads)


def test_a_refused_kernel_says_why(tmp_path: Path) -> None:
    on_gpu(tmp_path, refuses)


def scales_itself(path: Path, device: str = "cuda") -> None:
    """Student a overflows in two steps; b ends as it does without a."""
    scales, ended = Scales(path / "scales"), []
    for students in ({"a": Loud(2.0**24, {3, 5}), "b": CrossEntropy()}, {"b": CrossEntropy()}):
        plugin = MixedPrecision("16-mixed", device, GradScaler(device, init_scale=2.0**8))
        options = {"accelerator": device, "plugins": [plugin], "max_epochs": 4, "deterministic": True}
        module = company(**students)
        fit(module, digits(), callbacks=[scales] if "a" in students else [], **options)
        ended.append(weights(module.students["b"]))
    assert scales.values("a") == [2.0**8] * 3 + [2.0**7] * 2 + [2.0**6] * 7
    assert scales.values("b") == [2.0**8] * 12
    assert_same(*ended)


def test_who_overflows_skips_its_own_steps_only(tmp_path: Path) -> None:
    on_gpu(tmp_path, scales_itself, tmp_path)


def exactly(method: str, device: str = "cuda") -> None:
    """The method's kernels have a deterministic form: torch refuses others under `exact`."""
    ended = []
    for _ in range(2):
        student = net(ViT, **VIT) if method == "DeiTToken" else net(ResNet, depth=8)
        students = {"a": (student, getattr(objectives, method)())}
        module = Distillation(net(ResNet, seed=1, depth=8), students, input_shape=SHAPE, samples=101)
        with warnings.catch_warnings(action="ignore", category=UserWarning):  # torch's, such as of BatchNorm's few rows
            ended.append(weights(fit(module, digits(), accelerator=device, strategy=DDP(exact=4))))
    assert_same(*ended)


@pytest.mark.parametrize("method", sorted({*zoo.methods({}).values()}))
def test_every_method_has_the_same_bits_twice(method: str, tmp_path: Path) -> None:
    on_gpu(tmp_path, exactly, method)
