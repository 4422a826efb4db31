"""Ranks see together what one process sees, and a resumed fit what an undisturbed one would have seen."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import torchvision.transforms.v2.functional as tv
from lightning.pytorch import Callback, Trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD

from apprentice.batch import Batch
from apprentice.errors import BadInput
from apprentice.keyed import with_seed
from datamodules import CIFAR10, Digits
from datamodules.images import ImageData, augment
from lit_modules.classifier import LitClassifier
from tests.callbacks import Saver, Seen
from tests.training import classifier, trainer

RANKS = (1, 2, 3, 8)


def digits(replicas: int = 1, rank: int = 0, **options: object) -> Digits:
    """101 + 41 + 97 samples in batches of 20, nothing that 3 or 8 divides, on one rank of a pretended trainer."""
    data = Digits(**{"batch_size": 20, "train_size": 101, "validation_size": 41, "test_size": 97} | options)
    place = {"num_replicas": replicas, "rank": rank} if replicas > 1 else None
    cpu = SimpleNamespace(root_device=torch.device("cpu"))
    data.trainer = SimpleNamespace(distributed_sampler_kwargs=place, strategy=cpu, training=False)  # type: ignore[assignment]
    return data


def equal(a: Batch, b: Batch) -> bool:
    return all(torch.equal(x, y) if isinstance(x, Tensor) else x == y for x, y in zip(a, b, strict=True))


def joined(shares: list[Batch]) -> Batch:
    """Put together what the ranks saw of one batch, as the only rank would have seen it."""
    assert len({(share.count, share.step) for share in shares}) == 1
    assert {share.replicas for share in shares} == {len(shares)}
    tensors = (torch.cat([share[field] for share in shares]) for field in range(4))
    return Batch(*tensors, shares[0].count, 1, shares[0].step)


@pytest.mark.parametrize("replicas", RANKS)
@pytest.mark.parametrize("sizes", [{}, {"batch_size": 9, "train_size": 10}], ids=str)
def test_ranks_see_together_the_batches_of_one_process(replicas: int, sizes: dict) -> None:
    """With 10 samples in batches of 9 all ranks but one get an empty share of the last."""
    whole = digits(**sizes).train_dataloader()
    ranks = [digits(replicas, rank, **sizes).train_dataloader() for rank in range(replicas)]
    for epoch in (0, 1):
        for loader in (whole, *ranks):
            loader.sampler.set_epoch(epoch)
        for batch, *shares in zip(whole, *ranks, strict=True):
            assert equal(joined(shares), batch)
            assert torch.equal(batch.rows, torch.arange(batch.count))
            assert max(len(share.rows) for share in shares) - min(len(share.rows) for share in shares) <= 1


def test_a_batch_of_more_than_all_samples_is_one_of_all() -> None:
    data = digits(batch_size=2**31 - 1)
    for loader, size in ((data.train_dataloader(), 101), (data.val_dataloader(), 41), (data.test_dataloader(), 97)):
        (batch,) = loader
        assert (batch.count, len(batch.labels)) == (size, size)
        assert sorted(batch.index.tolist()) == list(range(size))


def test_an_epoch_visits_each_sample_once_with_its_label_and_its_step() -> None:
    data = digits()
    train, loader = data.split("train"), data.train_dataloader()
    loader.sampler.set_epoch(2)
    batches = list(loader)
    assert len(loader) == len(batches) == 6
    assert [batch.count for batch in batches] == [20] * 5 + [1]  # no dropped tail
    assert [batch.step for batch in batches] == list(range(12, 18))
    index = torch.cat([batch.index for batch in batches])
    assert torch.equal(index.sort().values, torch.arange(101))
    assert torch.equal(torch.cat([batch.inputs for batch in batches]), train.inputs[index])
    assert torch.equal(torch.cat([batch.labels for batch in batches]), train.labels[index])


def test_order_depends_on_training_seed_and_epoch() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        data = digits()
        data.order_seed = seed
        loader = data.train_dataloader()
        loader.sampler.set_epoch(epoch)
        return torch.cat([batch.index for batch in loader]).tolist()

    orders = [order(seed, epoch) for seed in (0, 1) for epoch in (0, 1)]
    assert len({tuple(each) for each in orders}) == 4
    assert order(1, 1) == orders[3]


@pytest.mark.parametrize("replicas", RANKS)
@pytest.mark.parametrize("part", ["train", "validation", "test"])
def test_evaluation_deals_the_chunks_of_one_process(part: str, replicas: int) -> None:
    def loaded(count: int, rank: int) -> list[Batch]:
        data = digits(count, rank)
        in_order = partial(data.train_in_order, rank, count)
        loader = {"train": in_order, "validation": data.val_dataloader, "test": data.test_dataloader}[part]()
        assert len(list(loader)) == len(loader)
        return list(loader)

    chunks = loaded(1, 0)
    ranks = [loaded(replicas, rank) for rank in range(replicas)]
    assert len({len(batches) for batches in ranks}) == 1
    dealt = [batch for deal in zip(*ranks, strict=True) for batch in deal]
    for chunk, batch in zip(chunks, dealt, strict=False):
        assert equal(chunk, batch)
    for batch in dealt[len(chunks) :]:
        assert (len(batch.inputs), batch.inputs.shape[1:], batch.mean(batch.labels.float())) == (0, (1, 8, 8), 0)
    split = digits().split(part)
    assert torch.equal(torch.cat([batch.index for batch in chunks]), torch.arange(len(split.labels)))
    assert torch.equal(torch.cat([batch.inputs for batch in chunks]), split.inputs)
    assert torch.equal(torch.cat([batch.labels for batch in chunks]), split.labels)


def test_a_batch_smaller_than_the_number_of_devices_is_refused() -> None:
    with pytest.raises(BadInput, match=r"^data.batch_size 7: expected at least 8, one sample for each device$"):
        digits(8, 0, batch_size=7).train_dataloader()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_normalized_images_are_torchvisions_to_the_bit(dtype: torch.dtype) -> None:
    data = CIFAR10()
    images = torch.arange(256, dtype=torch.uint8).repeat(3 * 8).view(8, 3, 16, 16)
    expected = tv.normalize(images.to(dtype) / 255, list(data.mean), list(data.std))
    assert torch.equal(data.normalize(images, dtype), expected)
    assert data.normalize(images, torch.bfloat16).dtype == torch.bfloat16
    train = Digits(validation_size=0).split("train").inputs
    normal = Digits().normalize(train, torch.float64)
    assert abs(normal.mean()) < 1e-3
    assert abs(normal.std() - 1) < 1e-3


def images(size: int) -> Tensor:
    return torch.randint(1, 256, (64, 3, size, size), generator=torch.manual_seed(0)).byte()


@pytest.mark.parametrize(("size", "pad"), [(32, 4), (28, 3), (8, 1), (7, 0)])
@pytest.mark.parametrize("flip", [True, False])
def test_augmentation_is_a_crop_of_the_padded_image_or_of_its_mirror(size: int, pad: int, flip: bool) -> None:
    index = torch.arange(64)
    before, after = images(size), augment(images(size), 7, index, flip)
    corners = set()
    for image, result in zip(before, after, strict=True):
        found = [
            (mirrored, y, x)
            for mirrored in ((False, True) if flip else (False,))
            for y in range(2 * pad + 1)
            for x in range(2 * pad + 1)
            if torch.equal(F.pad(image, [pad] * 4)[:, y : y + size, x : x + size].flip(-1 if mirrored else ()), result)
        ]
        assert len(found) == 1
        corners.add(found[0])
    assert {mirrored for mirrored, _, _ in corners} == ({True, False} if flip else {False})
    assert {y for _, y, _ in corners} == {x for _, _, x in corners} == set(range(2 * pad + 1))


def test_augmentation_of_a_sample_is_the_same_in_any_company() -> None:
    before, index = images(32), torch.arange(100, 164)
    together = augment(before, 7, index, flip=True)
    alone = [augment(before[i : i + 1], 7, index[i : i + 1], flip=True) for i in range(64)]
    assert torch.equal(torch.cat(alone), together)
    assert torch.equal(augment(before.flip(0), 7, index.flip(0), flip=True).flip(0), together)
    assert augment(before[:0], 7, index[:0], flip=True).shape == (0, 3, 32, 32)
    for other in (augment(before, 8, index, flip=True), augment(before, 7, index + 1, flip=True)):
        assert not torch.equal(other, together)


def run(data: ImageData, **options: Any) -> tuple[Seen, Trainer]:
    seen, module = Seen(), classifier()
    runner = trainer(callbacks=[seen], **options)
    runner.fit(module, data)
    runner.test(module, data, verbose=False)
    return seen, runner


@pytest.mark.parametrize(
    ("precision", "dtype"), [("32-true", torch.float32), ("64-true", torch.float64), ("bf16-true", torch.bfloat16)]
)
def test_lightning_hands_over_normalized_batches_of_the_modules_type(precision: str, dtype: torch.dtype) -> None:
    data = Digits(batch_size=20, train_size=101, validation_size=41, test_size=97)
    seen, _ = run(data, precision=precision)
    assert len(seen.train) == 2 * 6
    assert len(seen.test) == 5
    for part in ("train", "validation", "test"):
        for batch in getattr(seen, part):
            assert isinstance(batch, Batch)
            stored = data.split(part)
            assert torch.equal(batch.inputs, data.normalize(stored.inputs[batch.index], dtype))
            assert torch.equal(batch.labels, stored.labels[batch.index])
            types = batch.inputs.dtype, batch.labels.dtype, batch.index.dtype, type(batch.count)
            assert types == (dtype, torch.int64, torch.int64, int)


def test_only_training_batches_are_augmented_and_by_epoch_and_sample() -> None:
    data = Digits(batch_size=20, train_size=101, validation_size=41, test_size=97, augment=True)
    plain = Digits(batch_size=20, train_size=101, validation_size=41, test_size=97)
    assert (data.train_inputs_repeat, plain.train_inputs_repeat) == (False, True)
    seen, _ = run(data)
    by_epoch = []
    for epoch in (seen.train[:6], seen.train[6:]):
        order = torch.cat([batch.index for batch in epoch]).argsort()
        by_epoch.append(torch.cat([batch.inputs for batch in epoch])[order])
    stored = data.normalize(data.split("train").inputs)
    changed = [(inputs != stored).flatten(1).any(1).float().mean().item() for inputs in by_epoch]
    assert min(changed) > 0.7  # 1 of 9 crops of an 8 x 8 image leaves it in its place
    assert not torch.equal(*by_epoch)
    for part in ("validation", "test"):
        inputs = torch.cat([batch.inputs for batch in getattr(seen, part)][-5:])
        assert torch.equal(inputs[-len(data.split(part).labels) :], data.normalize(data.split(part).inputs))


def test_no_validation_samples_means_no_validation() -> None:
    seen, runner = run(Digits(batch_size=500, validation_size=0))
    assert (seen.validation, runner.num_val_batches) == ([], [])
    assert sum(len(batch.labels) for batch in seen.train) == 2 * 1437


def test_usable_without_a_trainer() -> None:
    data = Digits(train_size=300)
    batch = next(iter(data.train_dataloader()))
    assert (batch.inputs.shape, batch.inputs.dtype) == ((128, 1, 8, 8), torch.uint8)
    assert data.on_after_batch_transfer(batch, 0).inputs.dtype == torch.float32
    loaders = data.train_dataloader(), data.val_dataloader(), data.test_dataloader()
    assert [len(list(loader)) for loader in loaders] == [len(loader) for loader in loaders] == [3, 1, 3]
    assert list(Digits(validation_size=0).val_dataloader()) == []


EPOCHS, BATCHES = 3, 5  # 75 samples in batches of 16


def data(validation_size: int = 40) -> Digits:
    module = Digits(batch_size=16, train_size=75, validation_size=validation_size, test_size=10, augment=True)
    module.transforms = ["RandomVerticalFlip"]
    module.order_seed = 3
    return module


def fit(digits: Digits, callbacks: list[Callback], ckpt: Path | None = None, **options: Any) -> tuple[Any, Any]:
    """What a linear classifier sees, and its weight at the end."""
    net = with_seed(0, lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)))
    module, seen = LitClassifier(net, optimizer=partial(SGD, lr=0.1, momentum=0.9)), Seen()
    trainer(max_epochs=EPOCHS, callbacks=[seen, *callbacks], **options).fit(module, digits, ckpt_path=ckpt)
    batches = [(step, batch.step, batch.index.tolist()) for step, batch in zip(seen.steps, seen.train, strict=True)]
    return batches, net[1].weight


MOMENTS = "train_batch_start", "train_batch_end", "validation_batch_end", "validation_end", "train_epoch_end"
HOOKS = [f"on_{moment}" for moment in MOMENTS]
OPTIONS: list[dict] = [{}, {"limit_train_batches": 3}, {"val_check_interval": 2}, {"max_steps": 12}]
# Lightning, with any loader, miscounts epochs when max_steps is given and it resumes from an epoch's end.
CASES = [
    (hook, options) for hook in HOOKS for options in OPTIONS if (hook, *options) != ("on_train_epoch_end", "max_steps")
]


@pytest.mark.parametrize(("hook", "options"), CASES, ids=str)
def test_resumed_fit_is_the_undisturbed_one(tmp_path: Path, hook: str, options: dict) -> None:
    digits = data()
    whole, weight = fit(digits, [Saver(tmp_path, hook)], **options)
    batches = options.get("limit_train_batches", BATCHES)
    epochs = [[index for _, step, index in whole if step // BATCHES == epoch] for epoch in range(EPOCHS)]
    assert [len(epoch) for epoch in epochs[:2]] == [batches, batches]
    assert epochs[0] != epochs[1] != epochs[2]
    checkpoints = list(tmp_path.glob("*.ckpt"))
    assert len(checkpoints) >= 2
    for checkpoint in checkpoints:
        resumed, ended = fit(digits, [], checkpoint, **options)
        assert resumed == [seen for seen in whole if seen[0] >= int(checkpoint.stem)], checkpoint.name
        assert torch.equal(ended, weight), checkpoint.name


def test_resumed_without_validation(tmp_path: Path) -> None:
    digits = data(validation_size=0)
    whole, weight = fit(digits, [Saver(tmp_path, "on_train_batch_end")])
    for done in (3, 5, 11):
        resumed, ended = fit(digits, [], tmp_path / f"{done}.ckpt")
        assert resumed == whole[done:]
        assert torch.equal(ended, weight)


def test_other_passes_during_and_after_a_fit_are_whole() -> None:
    """Only Lightning's own pass goes on where its progress stands."""

    class Passes(Callback):
        lengths: ClassVar[list[int]] = []

        def on_train_batch_end(self, trainer: Trainer, *args: object) -> None:
            self.lengths.append(len(list(trainer.datamodule.train_dataloader())))
            self.lengths.append(len(list(trainer.train_dataloader)))

    digits = data()
    fit(digits, [Passes()])
    assert Passes.lengths == [BATCHES] * 2 * EPOCHS * BATCHES
    assert len(list(digits.train_dataloader())) == BATCHES


def test_checkpoint_holds_no_loader_state(tmp_path: Path) -> None:
    fit(data(), [Saver(tmp_path, "on_train_batch_end")])
    checkpoint = torch.load(tmp_path / "7.ckpt", weights_only=True)
    assert checkpoint["loops"]["fit_loop"]["state_dict"] == {"combined_loader": [{}]}
    assert "Digits" not in checkpoint
