"""The parts of the study of attention: its rows, what they call, the tables."""

from dataclasses import replace
from functools import reduce
from typing import Any

import pytest
import torch

from experiments import attention
from lab.studies.attention import Case, all_cases
from lab.studies.attention.cases import LAYERS, PARTS, half_padded, tutorials_lengths
from lab.studies.attention.measure import block, find_kernel, open_call
from lab.studies.attention.report import kernels, refusals

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("one_thread")


def test_rows_of_a_gpu() -> None:
    config = attention.parser().parse([])
    cases = all_cases(config, "cuda")
    assert len({row.name for row in cases}) == len(cases)
    assert {row.part for row in cases} == set(PARTS)
    assert {row.length for row in cases if row.part == "kernels"} == {2**n for n in range(7, 15)}
    assert all(row.batch * row.length == 2**14 for row in cases if row.part in {"kernels", "blocks"})
    shapes = {row.tutorial_us: row for row in cases if row.tutorial_us is not None}
    assert set(shapes) == {19_254, 4_143, 2_263, 939, 560, 407.8, 521.2}
    assert {(row.batch, row.dtype, row.causal) for row in shapes.values()} == {(32, "float16", False)}
    assert {(shapes[us].heads, shapes[us].length, shapes[us].head_dim) for us in (19_254, 4_143, 2_263)} == {
        (32, 1024, 32)
    }
    assert [shapes[us].length for us in (939, 560, 407.8, 521.2)] == [512, 512, 256, 256]
    assert [shapes[us].compiled for us in (939, 560, 407.8, 521.2)] == [False, False, False, True]


def test_the_tutorials_shapes_with_fewer_texts() -> None:
    config = attention.parser().parse(["--parts", "tutorial", "--tokens", "4096"])
    rows = all_cases(config, "cpu")
    assert {(row.batch, row.length) for row in rows} == {(4, 1024), (8, 512), (16, 256)}
    assert {row.tutorial_us for row in rows} == {None}
    (jagged,) = (row for row in rows if row.lengths)
    assert (len(jagged.lengths), max(jagged.lengths)) == (8, 512)


def test_texts_of_unequal_length() -> None:
    assert half_padded(4, 100) == (1, 34, 67, 100)
    assert half_padded(1, 101) == (51,)
    for seed in range(20):
        lengths = tutorials_lengths(32, 512, seed)
        assert max(lengths) == 512
        assert sorted(lengths)[-2] < 512
        assert sum(sorted(lengths)[:-1]) / 31 == pytest.approx(256, abs=3)
    assert tutorials_lengths(32, 512, 3) == tutorials_lengths(32, 512, 3)


def test_operations_of_a_block() -> None:
    row = Case("blocks", "float32", 2, 4, 2, 3, block=True, causal=False, lengths=(4, 2))
    assert row.operations == 4 * 6 * (16 + 4) + 2 * 6 * 18 * 6 + 2 * 6 * 6 * 6
    assert replace(row, backward=True).operations == 3.5 * 4 * 6 * 20 + 3 * (2 * 6 * 18 * 6 + 2 * 6 * 6 * 6)
    assert replace(row, layer="Block").projections == 3 * row.projections  # and an MLP of 4 times the width
    assert replace(row, lengths=None, causal=True).operations == 2 * 6 * 32 + (2 * 6 * 18 + 2 * 6 * 6) * 8


@pytest.mark.parametrize("block", [False, True])
def test_what_is_called_has_the_gradients_of_everything(block: bool) -> None:
    row = Case("kernels", "float32", 2, 8, 2, 4, block=block, backward=True)
    with open_call(row, CPU) as call:
        gradients = call()
        assert [tuple(x.shape) for x in gradients] == (
            [(2, 8, 8), (24, 8), (24,), (8, 8), (8,)] if block else [(2, 2, 8, 4)] * 3
        )
        assert all(x.abs().sum() > 0 for x in gradients)
        for again, x in zip(call(), gradients, strict=True):
            assert torch.equal(again, x)


OURS = {  # of torch's parameters
    "self_attn.": "attention.", "in_proj_": "qkv.", "out_proj": "out", "linear1": "mlp.0", "linear2": "mlp.2",
}  # fmt: skip


@pytest.mark.parametrize(("ours", "other"), [LAYERS[:2], LAYERS[2:]])
@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_and_torchs_are_one_function(ours: str, other: str, bias: bool) -> None:
    row = Case("layers", "float64", 2, 8, 2, 4, block=True, causal=False, layer=ours, bias=bias)
    mine, torchs = block(row).double().eval(), block(replace(row, layer=other)).double().eval()
    for parameter in mine.parameters():
        torch.nn.init.normal_(parameter)
    weights = mine.state_dict()
    named = {name: reduce(lambda text, pair: text.replace(*pair), OURS.items(), name) for name in torchs.state_dict()}
    torchs.load_state_dict({name: weights[own] for name, own in named.items()})
    x = torch.randn(2, 8, 8, dtype=torch.float64)
    torch.testing.assert_close(torchs(x), mine(x), rtol=1e-12, atol=1e-12)
    with torch.no_grad():  # its fast path
        torch.testing.assert_close(torchs(x), mine(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("layer", LAYERS)
def test_layers_are_called_with_the_gradients_of_everything(layer: str) -> None:
    row = Case("layers", "float32", 2, 8, 2, 4, block=True, causal=False, layer=layer, backward=True)
    with open_call(row, CPU) as call:
        assert all(x.abs().sum() > 0 for x in call())


def test_dropout_of_the_tutorials_block_is_off() -> None:
    row = Case("tutorial", "float32", 2, 8, 2, 4, block=True, dropout=0.9)
    with open_call(row, CPU) as call:
        assert torch.equal(call(), call())


def test_the_fused_kernel_is_told_by_its_name() -> None:
    assert find_kernel(["aten::mm", "aten::_scaled_dot_product_flash_attention_for_cpu"]) == "flash"
    assert find_kernel(["aten::_efficient_attention_forward"]) == "efficient"
    assert find_kernel(["aten::_scaled_dot_product_cudnn_attention"]) == "cudnn"
    assert find_kernel(["aten::_scaled_dot_product_attention_math", "aten::bmm"]) == "math"


def test_tables_name_the_fastest_and_group_refusals() -> None:
    def fact(backend: str, us: float | None, refused: str | None = None) -> dict[str, Any]:
        row = Case("kernels", "float32", 4, 512, 8, 64, backend=backend)
        facts = {"name": row.name, **vars(row), "direction": row.direction, "refused": refused}
        timed = {"microseconds": us, "kernel": backend, "tflops_per_second": 0.5, "share_of_peak": 0.25}
        return facts if us is None else facts | timed

    timed_rows = [
        fact("math", 400.0),
        fact("flash", 100.0),
        fact("cudnn", None, "No GPU."),
        fact("efficient", None, "No GPU."),
    ]
    fastest = kernels(timed_rows)
    assert fastest.header[3:] == ["µs: math", "flash", "fastest", "TFLOP/s", "share, %"]
    assert fastest.rows == [["float32", "forward", "4 x 512", "400", "100", "flash", "0.500", "25"]]
    assert refusals(timed_rows) == ["Not run: kernels: cudnn and kernels: efficient in float32, 2 rows: No GPU."]
