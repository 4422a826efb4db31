"""A language model trains to the same numbers wherever it is trained."""

import math
import pickle
from collections.abc import Iterator
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._inductor.config
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import strategies
from apprentice.batch import Batch
from apprentice.keyed import with_seed
from datamodules import Text
from harness.runs.quiet import quiet
from lit_modules.language_model import LitLanguageModel
from lit_modules.nets import GPT
from lit_modules.tasks import TokenScores
from lit_modules.text.gpt2_optimization import rate_factor
from strategies import DDP, FSDP, PipelineStrategy
from tests.callbacks import SaveAndStop
from tests.grids import mostly_slow
from tests.language import language_model, text
from tests.strategies.test_strategies import STEPS
from tests.training import LinesLogger, Outcome, assert_agree, assert_same, fit, on, outcome, trainer, weights

PLACES = [
    "ddp 1", "ddp 3", "fsdp 1", "fsdp 3", "fsdp 2, recomputed", "tensor_parallel 2", "fsdp 4, 2 x 2", "hsdp 4",
    "ddp_zero1 2", "ddp_ring 2", "ddp_allreduce 2", "param_server 2", "pipeline 2", "pipeline 4, 2 x 2",
    "model_parallel 2",
]  # fmt: skip
RECOMPUTED = {"activation_checkpointing": True}
OPTIONS: dict[str, dict[str, Any]] = {
    "fsdp 2, recomputed": RECOMPUTED,
    "fsdp 4, 2 x 2": RECOMPUTED | {"mesh": {"data": 2, "tensor": 2}},
    "pipeline 4, 2 x 2": {"data_parallel_size": 2},
}


class Watched(Callback):
    def __init__(self) -> None:
        self.rates: list[float] = []
        self.norms: list[float] = []

    def on_before_zero_grad(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        if any(p.grad is not None for p in pl_module.parameters()):
            self.norms.append(math.sqrt(sum(float(p.grad.double().square().sum()) for p in pl_module.parameters())))

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])


CLIP = 0.05  # which each of these steps comes up against


def trained(path: Path, place: str = "auto 1", tied: bool = True, **options: Any) -> Outcome:
    """Losses of 20 steps, four epochs, with dropout, clipped, and bits per character; weights at their end."""
    path.mkdir()
    data, tags = text(path), ["train/loss", "val/bpc"]
    module = language_model(data, dropout=0.2, tie_weights=tied, lr=0.01, clip_norm=CLIP)
    where = on(place.partition(",")[0], **OPTIONS.get(place, {}))
    return outcome(module, data, path, tags, **STEPS | where | options)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Outcome]:
    folder = tmp_path_factory.mktemp("alone")
    seen = Watched()
    found = {tied: trained(folder / str(tied), tied=tied, callbacks=[seen]) for tied in (True, False)}
    assert (min(seen.norms), max(seen.norms)) == pytest.approx((CLIP, CLIP), rel=1e-4)
    return found


@pytest.mark.parametrize("place", mostly_slow(PLACES, "pipeline 2"))
def test_float64_losses_are_those_of_one_process(place: str, alone: dict[bool, Outcome], tmp_path: Path) -> None:
    tied = not place.startswith(("pipeline", "model_parallel"))
    losses, bits = alone[tied][0][:20], alone[tied][0][20:]
    assert losses[-1] < losses[0] - 0.2
    assert len(bits) == 4
    assert_agree(alone[tied], trained(tmp_path / "run", place, tied))


SAME = {"ddp_fork", "ddp_notebook", "ddp_spawn"}  # ddp, its ranks started otherwise
LOSSY = {  # how many losses are the same, and how near the others
    "ddp_fp16": (1, 1e-3),
    "ddp_powersgd": (11, 0.1),  # ten steps' gradients travel whole
    "local_sgd": (1, 0.2),
}


@pytest.mark.slow  # of classifiers: tests/strategies/test_strategies.py
@pytest.mark.parametrize("name", LOSSY)
def test_what_compresses_begins_alike_and_stays_near(name: str, alone: dict[bool, Outcome], tmp_path: Path) -> None:
    same, near = LOSSY[name]
    losses, theirs = (x[0][:20] for x in (alone[True], trained(tmp_path / "run", f"{name} 2")))
    assert theirs[:same] == pytest.approx(losses[:same], abs=1e-9, rel=0)
    assert 1e-6 < max(abs(a - b) for a, b in zip(losses, theirs, strict=True)) < near


def test_every_strategy_is_tried() -> None:
    assert {place.split()[0] for place in [*PLACES, *LOSSY]} == strategies.NAMES.keys() - SAME


def bits(path: Path, where: dict[str, Any], **options: Any) -> tuple[dict[str, torch.Tensor], bytes]:
    """Weights and log of a float32 run in which every layer of keyed dropout is on."""
    path.mkdir(exist_ok=True)
    logger, data = CSVLogger(path, name="log", version=str(len(list(path.glob("log/*"))))), text(path)
    module = language_model(data, **{"dropout": 0.2, "tie_weights": False} | options)
    fit(module, data, **where, logger=logger, max_epochs=2, log_every_n_steps=1)
    return weights(module), (Path(logger.log_dir) / "metrics.csv").read_bytes()


@pytest.mark.slow
def test_exact_bits_are_those_of_one_process(tmp_path: Path) -> None:
    one = bits(tmp_path, on("ddp 1 exact 4"))
    tied, other = (bits(tmp_path, on(f"ddp {n} exact 4"), tie_weights=True) for n in (1, 2))
    assert len(one[1].splitlines()) > 10
    assert_same(tied[0], other[0])
    assert tied[1] == other[1] != one[1]
    in_two = on("pipeline 4 exact 4", data_parallel_size=2, schedule="GPipe")
    for where in (on("ddp 2 exact 4"), on("ddp 3 exact 4"), on("pipeline 2 exact 4"), in_two):
        other = bits(tmp_path, where)
        assert_same(one[0], other[0])
        assert one[1] == other[1]


NOISE = r"TorchNoise draws noise from torch's generator in blocks.0.dropout1: its numbers move with the devices and"


class TorchNoise(GPT):
    """Someone's GPT with torch's own dropout."""

    def __init__(self, vocab_size: int, block_size: int, **options: Any) -> None:
        super().__init__(vocab_size, block_size, num_layers=3, num_heads=2, embed_dim=12, **options)
        self.blocks[0].dropout1 = nn.Dropout(0.3)


def noisy(data: Text, **options: Any) -> LitLanguageModel:
    return LitLanguageModel(with_seed(0, lambda: TorchNoise(**data.net_arguments, **options)), warmup_steps=5)


def test_torchs_noise_is_exact_under_exact_alone(tmp_path: Path) -> None:
    found = {}
    for exact in (" exact 4", ""):
        for devices in (1, 2):
            data = text(tmp_path)
            with pytest.warns(UserWarning, match=NOISE):
                module = noisy(data)
            found[exact, devices] = weights(fit(module, data, **on(f"ddp {devices}{exact}"), max_epochs=1))
    assert_same(found[" exact 4", 1], found[" exact 4", 2])
    with pytest.raises(AssertionError):
        assert_same(found["", 1], found["", 2], atol=1e-3)


def test_an_exact_pipeline_refuses_torchs_noise(tmp_path: Path) -> None:
    data = text(tmp_path)
    with pytest.warns(UserWarning, match=NOISE):
        module = noisy(data, tie_weights=False)
    with pytest.raises(ValueError, match=r"exact 4: expected apprentice.keyed.Dropout in a pipeline; net.blocks.0"):
        fit(module, data, **on("pipeline 2 exact 4"))


def test_resumed_under_other_strategies_it_ends_the_same(alone: dict[bool, Outcome], tmp_path: Path) -> None:
    path = tmp_path / "run.ckpt"
    chain: list[Any] = [(FSDP(timeout=60), 2, 7), (PipelineStrategy(timeout=60), 2, 13), (DDP(), 1, 20)]
    for strategy, devices, until in chain:
        data = text(tmp_path)
        module = language_model(data, dropout=0.2, tie_weights=False, lr=0.01, clip_norm=CLIP)
        resumed = {"ckpt_path": path, "weights_only": True} if path.exists() else {}
        with quiet():
            made = trainer(devices, **STEPS | {"callbacks": [SaveAndStop(path, until)], "strategy": strategy})
            made.fit(module, data, **resumed)
    assert_same(weights(module), alone[False][1], atol=1e-9)


class Traced(Callback):
    """Fails in a rank that has compiled nothing, or whose compiler would wait for the pool of another process."""

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not torch._dynamo.utils.counters["frames"]["ok"]:
            raise AssertionError("nothing was compiled")
        if torch._inductor.config.compile_threads != 1:
            raise AssertionError("not compiled alone")


@pytest.fixture
def tracing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is traced is the same with any backend; this one needs no compiler."""
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend="aot_eager"))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with torch._inductor.config.patch(compile_threads=4):
        yield


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's own looking
@pytest.mark.usefixtures("tracing")
@pytest.mark.slow
def test_compiled_it_trains_to_eager_losses_on_two_ranks(tmp_path: Path) -> None:
    found = []
    for compiled in (False, True):
        path = tmp_path / str(compiled)
        path.mkdir()
        data, logger = text(path, batch_size=12), LinesLogger(path / "log")
        module = language_model(data, dropout=0.2, compiled=compiled, num_layers=1)
        options = {"callbacks": [Traced()] if compiled else [], "strategy": DDP(timeout=120)}
        fit(module, data, 2, logger=logger, max_epochs=1, log_every_n_steps=1, **options)
        found.append(logger.values("train/loss"))
    assert found[0] == pytest.approx(found[1], abs=1e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("tracing")
def test_what_a_spawned_rank_receives_compiles_and_so_does_the_step_alone(tmp_path: Path) -> None:
    data = text(tmp_path)
    module = pickle.loads(pickle.dumps(language_model(data, compiled=True)))
    module.on_fit_start()
    assert module.net._compiled_call_impl is not None
    batch = next(iter(data.train_dataloader()))
    module.timed_steps("", batch)[0.0]().backward()
    assert torch._dynamo.utils.counters["frames"]["ok"] == 1


def test_scores_count_tokens(tmp_path: Path) -> None:
    logits = torch.randn(5, 7, 11, generator=torch.Generator().manual_seed(0))
    labels = torch.randint(11, (5, 7), generator=torch.Generator().manual_seed(1))
    labels[4, :3] = -100
    scores = TokenScores(tokens_per_unit=1.5)
    for rows in ((0, 2), (2, 2), (2, 5)):
        scores.update(logits[slice(*rows)], labels[slice(*rows)])
    log_p = logits.double().log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    loss = -log_p[labels >= 0].sum().item() / 32
    found = {name: value.item() for name, value in scores.compute().items()}
    expected = {"loss": loss, "bpc": 1.5 * loss / math.log(2), "perplexity": math.exp(loss)}
    assert found == pytest.approx(expected, abs=1e-6)
    scores.reset()
    scores.update(logits[:1], labels[:1])
    assert scores.compute()["loss"].item() == pytest.approx(-log_p[0].mean().item(), abs=1e-6)
    each = scores.per_label(logits[:4], labels[:4])["bpc"].mean(1)
    torch.testing.assert_close(each.double(), -log_p[:4].mean(1) * 1.5 / math.log(2), atol=1e-5, rtol=0)


def watched(data: Text, **options: Any) -> tuple[Watched, LitLanguageModel]:
    seen, module = Watched(), language_model(data, lr=0.01, clip_norm=0.1)
    fit(module, data, callbacks=[seen], **STEPS | options)
    return seen, module


def test_it_warms_up_and_follows_a_cosine_and_clips(tmp_path: Path) -> None:
    data = text(tmp_path)
    seen, _ = watched(data)
    rising = [0.01 * (step + 1) / 6 for step in range(5)]
    falling = [0.01 * (0.1 + 0.9 * (1 + math.cos(math.pi * step / 15)) / 2) for step in range(15)]
    assert seen.rates == pytest.approx([*rising, *falling])
    assert rate_factor(5, 20, 20) == pytest.approx(0.1)
    assert rate_factor(5, math.inf, 1000) == 1
    assert max(seen.norms) == pytest.approx(0.1, rel=1e-4)
    assert max(watched(data, gradient_clip_val=0.05)[0].norms) == pytest.approx(0.05, rel=1e-4)
    assert max(watched(data, gradient_clip_val=0)[0].norms) > 0.2


def test_weight_decay_is_for_matrices_alone(tmp_path: Path) -> None:
    data = text(tmp_path)
    module = watched(data)[1]
    decayed, others = module.trainer.optimizers[0].param_groups
    assert {p.dim() for p in decayed["params"]} == {2}
    assert {p.dim() for p in others["params"]} == {1}
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0)
    assert len(decayed["params"]) + len(others["params"]) == len(list(module.net.parameters()))


class Bigrams(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 11)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.table(tokens)


def pairs() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        tokens = torch.randint(11, (4, 6), generator=generator)
        yield tokens[:, :-1], tokens[:, 1:]


def test_anyones_net_learns_from_plain_pairs() -> None:
    module = LitLanguageModel(Bigrams())
    with quiet():
        trainer(max_epochs=1).fit(module, *(DataLoader(list(pairs()), batch_size=None) for _ in range(2)))
    tokens, labels = next(pairs())
    loss, parts = module.losses(module(tokens), Batch.of((tokens, labels), 0))
    expected = F.cross_entropy(module(tokens).flatten(0, 1), labels.flatten())
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(parts["bpc"].mean(), expected.detach() / math.log(2))
