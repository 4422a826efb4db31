"""Settings with which published tables of distillation were made, by name; each can still be changed by its flag.

Epochs, batch, optimizer, schedule, augmentation and the methods' weights are as published. So are the layers, which
methods choose by default: the nets' stages are what the tables' code compares. Nothing is held out, so that all
training images are trained on: choose no setting by the test accuracy that such a run prints. `few-labels` and `texts`
are ours, of the README's tables, and hold a validation part out; as training amplifies rounding, they are exact.
"""

from collections.abc import Mapping
from typing import Any, Literal

from harness.runs.exactness import DEVICES

Recipe = Literal[
    "few-labels", "texts", "pairs", "linearize", "tutorial", "repdistiller", "mdistiller", "torchvision-a1"
]

# Tian et al. 2020, arXiv:1910.10699: 0.01 is their rate for MobileNetV2 and ShuffleNet, 0.05 for all other nets.
_REPDISTILLER = {
    "trainer.max_epochs": 240, "data.batch_size": 64, "data.augment": True, "data.validation_size": 0,
    "optimizer": "SGD", "optimizer.lr": 0.05, "optimizer.momentum": 0.9, "optimizer.weight_decay": 5e-4,
    "scheduler": "MultiStepLR", "scheduler.milestones": [150, 180, 210], "scheduler.gamma": 0.1,
    "variants.kd": "Hinton", "variants.kd.temperature": 4.0, "variants.kd.kd_weight": 0.9, "variants.kd.ce_weight": 0.1,
}  # fmt: skip

DEFAULT: Recipe = "few-labels"  # of a run for which no data are chosen
DEFAULT_OF_TEXTS: Recipe = "texts"  # of `data Chat` without a path
DEFAULT_OF_PAIRS: Recipe = "pairs"  # of `data Pairs` without a net

RECIPES: Mapping[Recipe, Mapping[str, Any]] = {
    # Ours, of the README's table: smoothing, temperatures and weights validate best with seeds 100 to 102, of as many
    # settings for each method; schedule and rates are such that rounding hardly matters (docs/exact.md).
    "few-labels": {
        "exact": DEVICES, "data.labelled": 30, "trainer.max_epochs": 20, "trainer.gradient_clip_val": 1.0,
        "optimizer": "Adam", "optimizer.lr": 3e-3, "teacher_optimizer": "Adam", "teacher_optimizer.lr": 1e-3,
        "scheduler": "CosineWarmup", "scheduler.warmup_ratio": 0.1,
        "teacher": "DeepNN", "teacher.widths": [64, 32, 32, 32], "teacher.hidden": 256,
        "variants.ce": "CrossEntropy", "variants.ce.label_smoothing": 0.3,
        "variants.kd": "Hinton", "variants.kd.temperature": 1.6, "variants.kd.kd_weight": 2.0,
        "variants.cosine": None, "variants.hint": "Hint", "variants.hint.hint_weight": 0.05,
        "variants.ttm": "TTM", "variants.ttm.gamma": 0.5, "variants.ttm.ttm_weight": 50.0,
    },
    # Ours, of the README's table of texts: rate, batch, widths and epochs by the validation of nets that learn from
    # labels alone, with seeds 100 to 102 for the teacher; the methods have their own defaults.
    "texts": {
        "exact": DEVICES, "data": "Chat", "data.max_length": 256, "data.sort_lengths": True,
        "teacher": "GPT", "teacher.num_layers": 1, "teacher.embed_dim": 96, "teacher_epochs": 6,
        "student": "GPT", "student.num_layers": 1, "student.embed_dim": 48,
        "optimizer": "AdamW", "optimizer.lr": 3e-3, "scheduler": "CosineWarmup", "scheduler.warmup_ratio": 0.25,
        "trainer.max_epochs": 4, "trainer.gradient_clip_val": 1.0,
        "variants.ce": "CrossEntropy", "variants.kd": "Hinton", "variants.cosine": None, "variants.hint": None,
        "variants.reverse": "ReverseKL", "variants.gkd": "GKD",
    },
    # Ours, of the page of embeddings of texts: rates for nets of a table alone, by the validation of seeds 100 and 101.
    "pairs": {
        "optimizer.lr": 0.1, "teacher_optimizer": "AdamW", "teacher_optimizer.lr": 0.03, "trainer.max_epochs": 20,
        "data.validation_size": 0,
    },
    # Ours: other attention in a trained teacher, aligned first or not (Mixer, Linearize), on the texts of `texts`.
    "linearize": {
        "data": "Chat", "data.max_length": 256, "data.sort_lengths": True,
        "teacher": "GPT", "teacher.num_layers": 2, "teacher.embed_dim": 96, "teacher.position": "rotary",
        "student": "Mixer",
        "optimizer": "AdamW", "scheduler": "OneCycleLR", "scheduler.max_lr": 3e-3,
        "trainer.max_epochs": 4, "trainer.gradient_clip_val": 1.0,
        "variants.ce": "CrossEntropy", "variants.kd": "Hinton", "variants.kd.temperature": 1.0,
        "variants.kd.kd_weight": 1.0, "variants.kd.ce_weight": 0.0, "variants.cosine": None, "variants.hint": None,
        "variants.align": "Linearize",
    },
    # PyTorch, "Knowledge Distillation Tutorial"; weights and temperature of its methods are the defaults.
    "tutorial": {
        "trainer.max_epochs": 10, "data.batch_size": 128, "data.augment": False, "data.validation_size": 0,
        "optimizer": "Adam", "optimizer.lr": 1e-3, "scheduler": None,
    },
    "repdistiller": _REPDISTILLER,
    # Zhao et al. 2022, arXiv:2203.08679: the same schedule, and DKD for the nets of resnet32x4. For others beta is 6,
    # those of VGG-13 and WRN students of WRN-40-2, or 2, ResNet-20 and 32.
    "mdistiller": {
        **_REPDISTILLER, "variants.dkd": "DKD", "variants.dkd.alpha": 1.0, "variants.dkd.beta": 8.0,
        "variants.dkd.temperature": 4.0,
    },
    # Vryniotis 2021, "How to Train State-Of-The-Art Models Using TorchVision's Latest Primitives", without its 5 epochs
    # of warm-up, moving average of weights (`--ema`), repeated augmentation and larger test images.
    "torchvision-a1": {
        "trainer.max_epochs": 600, "data.batch_size": 1024, "data.augment": False, "data.validation_size": 0,
        "data.transforms": ["RandomHorizontalFlip", "TrivialAugmentWide", {"RandomErasing": {"p": 0.1}}],
        "data.mixup": 0.2, "data.cutmix": 1.0,
        "optimizer": "SGD", "optimizer.lr": 0.5, "optimizer.momentum": 0.9, "optimizer.weight_decay": 2e-5,
        "scheduler": "CosineAnnealingLR", "scheduler.T_max": 600,
        "variants.ce": "CrossEntropy", "variants.ce.label_smoothing": 0.1,
    },
}  # fmt: skip
