"""Costs equal counts made by hand; what can't be counted is not told."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchvision.models import mobilenet_v2

from apprentice.batch import Batch
from harness.studies import costs, operations
from lit_modules.classifier import LitClassifier
from lit_modules.distillation import Distillation
from lit_modules.language_model import LitLanguageModel
from lit_modules.nets import ResNet
from lit_modules.objectives import DML
from tests.language import gpt
from tests.training import SHAPE, assert_same, distillation, net, weights


def counted(forward: Callable[..., Tensor], *inputs: Tensor) -> int | None:
    return operations.flops(lambda: forward(*inputs).sum())


@pytest.mark.parametrize(("given", "sides"), [(True, 3), (False, 2)])
@pytest.mark.parametrize("groups", [1, 4, 8])
def test_convolutions_of_groups(groups: int, given: bool, sides: int) -> None:
    x = torch.randn(2, 8, 6, 6, requires_grad=given)
    conv = nn.Conv2d(8, 24, 3, 2, groups=groups)
    products = 2 * (2 * 2) * 24 * (8 // groups) * 9  # rows, positions of the output, channels, positions of the filter
    assert counted(conv, x) == 2 * sides * products
    back = nn.ConvTranspose2d(8, 24, 3, 2, groups=groups)
    assert counted(back, x) == 2 * sides * 2 * (6 * 6) * 24 * (8 // groups) * 9


def layers_by_hand(model: nn.Module, x: Tensor) -> int:
    """A multiplication and an addition for each weight and position: forward, gradients of weights, and of inputs."""
    counted = []

    def count(layer: Any, given: tuple[Tensor], output: Tensor) -> None:
        positions = output.numel() // output.shape[1]
        counted.append(2 * positions * layer.weight.numel() * (3 if given[0].requires_grad else 2))

    handles = [m.register_forward_hook(count) for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    model(x)
    for handle in handles:
        handle.remove()
    return sum(counted)


def test_mobilenet() -> None:
    model, x = mobilenet_v2(num_classes=10), torch.randn(2, 3, 32, 32)
    assert counted(model, x) == layers_by_hand(model, x)


@pytest.mark.parametrize("directions", [1, 2])
@pytest.mark.parametrize(("kind", "gates"), [(nn.LSTM, 4), (nn.GRU, 3), (nn.RNN, 1)])
def test_recurrent_layers(kind: Any, gates: int, directions: int) -> None:
    batch, length, width, hidden = 3, 5, 7, 11
    cells = kind(width, hidden, num_layers=2, bidirectional=directions == 2, batch_first=True)
    x = torch.randn(batch, length, width, requires_grad=True)
    inputs = [width, directions * hidden]
    step = 2 * batch * directions * gates * hidden
    expected = 3 * length * step * sum(size + hidden for size in inputs)
    if kind is not nn.LSTM:  # its own kernel computes a gradient of the first states, too
        expected -= step * hidden * len(inputs)
    assert counted(lambda x: cells(x)[0], x) == expected


def test_recurrent_kernels_of_gpus_are_counted_by_their_shapes() -> None:
    """By the arguments that cuDNN's kernels have; on the meta device, which computes nothing."""
    x, h = torch.randn(5, 3, 7, device="meta"), torch.randn(1, 3, 11, device="meta")
    cells = nn.LSTM(7, 11).to("meta")
    weights = [p.detach() for p in cells.parameters()]
    one = torch.zeros((), device="meta", requires_grad=True)

    def kernel() -> Tensor:
        torch.ops.aten._cudnn_rnn(x, weights, 4, None, h, h, 2, 11, 0, 1, False, 0.0, True, False, [], None)
        return one * 1

    assert operations.flops(kernel) == 2 * (5 * 3) * 4 * 11 * (7 + 11)
    backward = operations.FORMULAS[torch.ops.aten._cudnn_rnn_backward]
    assert backward(x.shape, [w.shape for w in weights], 4) == 2 * 2 * (5 * 3) * 4 * 11 * (7 + 11)


def test_a_matrix_times_a_vector() -> None:
    a, v = torch.randn(5, 7, requires_grad=True), torch.randn(7, requires_grad=True)
    assert counted(torch.matmul, a, v) == 2 * 2 * 5 * 7  # the matrix's gradient is an outer product


@torch.library.custom_op("apprentice_tests::product", mutates_args=())
def product(a: Tensor, b: Tensor) -> Tensor:
    return a @ b


product.register_autograd(
    lambda ctx, grad: (grad, grad), setup_context=lambda ctx, inputs, output: None
)  # of square ones: what it gives does not matter


@pytest.mark.parametrize("unknown", [product, torch.cdist, lambda a, b: torch.addbmm(a, a[None], b[None])])
def test_what_has_no_formula_is_not_told(unknown: Callable[[Tensor, Tensor], Tensor]) -> None:
    a = torch.randn(4, 4, requires_grad=True)
    assert counted(torch.matmul, a, a) == 3 * 2 * 4**3
    assert counted(lambda a: unknown(a, a) @ a, a) is None


def parameters_of(loss: Tensor) -> list[Tensor]:
    """The leaves of its graph."""
    seen, todo = set[Any](), [loss.grad_fn]
    while todo:
        if (node := todo.pop()) not in seen and node is not None:
            seen.add(node)
            todo += [following for following, _ in node.next_functions]
    return [node.variable for node in seen if hasattr(node, "variable")]


def tokens() -> Batch:
    text = torch.arange(12).reshape(2, 6) % 5
    return Batch.of((text, text), 0)


def images() -> Batch:
    return Batch.of((torch.rand(4, *SHAPE), torch.arange(4)), 0)


@pytest.mark.parametrize(
    ("make", "run", "batch"),
    [
        (lambda: LitClassifier(net(dropout=0.0)), "", images),
        (lambda: distillation(["hint"]), "hint", images),
        (lambda: LitLanguageModel(gpt(vocab_size=5)), "", tokens),
    ],
    ids=["classifier", "student", "language model"],
)
def test_a_step_begins_without_gradients(make: Callable[[], Any], run: str, batch: Callable[[], Batch]) -> None:
    module = make()
    step = module.timed_steps(run, batch())[0.0]
    for _ in range(2):
        parameters = parameters_of(loss := step())
        assert len(parameters) == len(module.parameter_groups()[run])
        assert [p.grad for p in parameters] == [None] * len(parameters)
        loss.backward()
        assert all(p.grad is not None for p in parameters)


def test_a_student_that_has_stopped_is_measured_with_its_teacher() -> None:
    """The ranks have trained: in the process that measures, the fit of several ranks has not ended."""
    module = distillation(["hint"])
    module.failed["hint"] = {}
    assert not module.step_request().teacher
    module.timed_steps("hint", images())[0.0]().backward()


@pytest.mark.parametrize(("seconds", "steps"), [(0.001, 11), (0.04, 8), (60, 2)])
def test_slow_steps_are_timed_fewer_times(seconds: float, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.ones(1, requires_grad=True)
    taken: list[Tensor] = []

    def step() -> Tensor:
        taken.append(weight.sum())
        return taken[-1]

    monkeypatch.setattr(costs, "LONGEST", 0.25)
    monkeypatch.setattr(costs.time, "perf_counter", lambda: len(taken) * seconds)
    assert costs.milliseconds(step) == pytest.approx(1e3 * seconds)
    assert len(taken) == steps


def test_peers_of_a_measured_student_keep_their_running_statistics() -> None:
    students = {"one": (net(ResNet, depth=8), DML(["two"])), "two": (net(ResNet, 1, depth=8), DML(["one"]))}
    module = Distillation(net(), students, SHAPE)
    before = weights(module)
    operations.flops(module.train().timed_steps("one", images())[0.0])
    assert_same(weights(module), before)
