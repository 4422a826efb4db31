"""Evaluation scores, which count each sample once on any number of ranks, and values of single test samples."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import Metric
from torchmetrics.utilities.data import dim_zero_cat

from apprentice.batch import label_mask
from lit_modules.objectives.base import widen

UNIT = 2.0**32
TRAIN, VALIDATION, TEST = PARTS = "train", "validation", "test"  # of a data set
ByPart = float | Mapping[str, float]  # of all parts, or of each by its name


class ExactMean(Metric):
    """Mean of per-sample values, summed in integers: whole parts, and fractions in units of 2**-32.

    Each value is rounded to 2e-10; a value that is not finite or above 2**53 makes the mean NaN.
    """

    whole: Tensor
    fraction: Tensor
    samples: Tensor
    broken: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in ("whole", "fraction", "samples", "broken"):
            self.add_state(name, torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, values: Tensor) -> None:
        """Add b samples: values (b,)."""
        values = values.detach().double()
        usable = values.abs() <= 2.0**53
        values = values.where(usable, 0.0)
        floor = values.floor()
        self.whole += floor.long().sum()
        self.fraction += ((values - floor) * UNIT).round().long().sum()
        self.samples += len(values)
        self.broken += (~usable).sum()

    def compute(self) -> Tensor:
        """The mean, a float64 scalar."""
        mean = (self.whole.double() + self.fraction.double() / UNIT) / self.samples
        return mean.where(self.broken == 0, torch.nan)


class TokenValues(NamedTuple):
    """In place of the logits of texts: values (b, T) of their tokens, 0 where a label does not count."""

    ce: Tensor  # cross-entropies
    beside: Mapping[str, Tensor]  # beside a teacher those of `compare_logits`, else none


class Embeddings(NamedTuple):
    """In place of logits: embeddings of the same samples."""

    student: Tensor  # (b, D_s)
    teacher: Tensor  # (b, D_t)


Scored = Tensor | TokenValues | Embeddings  # logits, or what stands for them


class Scores(nn.Module):
    """The scores of one run."""

    names: tuple[str, ...]  # of the values in a test's result, the most important first
    trained: tuple[str, ...]  # of the values that training logs beside the loss, as `per_label` has them
    sampled: tuple[str, ...] = ()  # of the values of a single sample in a test
    index: Tensor | None = None  # places (b,) in the set of the samples that `update` gets, if they are known
    part: str = TEST  # of the data that is scored

    def update(self, logits: Scored, labels: Tensor) -> None:
        """Add b samples: logits (b, ..., classes), labels (b, ...)."""
        raise NotImplementedError

    def compute(self) -> dict[str, Tensor]:
        """Values over all ranks, including those of `names`."""
        raise NotImplementedError

    def reset(self) -> None:
        """Start from zero."""
        for metric in self.children():
            cast("Metric", metric).reset()

    def per_label(self, logits: Tensor, labels: Tensor, ce: Tensor | None = None) -> dict[str, Tensor]:
        """Values (b, ...) by name in `trained`, whose means are logged; `ce` are cross-entropies, if known already."""
        raise NotImplementedError

    def of_sample(self, logits: Scored, labels: Tensor) -> dict[str, Tensor]:
        """Values (b,) by name in `sampled` of logits (b, ..., classes) and labels (b, ...)."""
        return {}

    def of_all_samples(self) -> dict[str, Tensor]:
        """Values (n,) of single samples that need all others, over all ranks, and their `place`."""
        return {}

    def confusion_matrix(self) -> Tensor | None:
        """Counts (classes, classes) over all ranks with the truth in rows, if there are classes to confuse."""
        return None


class Gathered(Metric):
    """Values (n, ...) of samples by name, such as logits or embeddings, of all ranks in the order of their places."""

    index: list[Tensor]

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.names = names
        for name in ("index", *names):
            self.add_state(name, [], dist_reduce_fx="cat")
        self.reset()

    def reset(self) -> None:
        """Start with none; a rank may get no sample, and others wait for what it has."""
        super().reset()
        self.index = [torch.zeros(0, dtype=torch.int64, device=self.device)]
        for name in self.names:  # flat, as a rank without a sample does not know the shape of a value
            setattr(self, name, [torch.zeros(0, dtype=torch.float64, device=self.device)])

    def update(self, index: Tensor | None, **values: Tensor) -> None:
        """Add b samples: their places (b,), None if they have none, and values (b, ...), kept in float64."""
        first = next(iter(values.values()))
        self.index.append(first.new_zeros(len(first), dtype=torch.int64) if index is None else index)
        for name, x in values.items():
            getattr(self, name).append(widen(x.detach()).double().flatten())

    def compute(self) -> dict[str, Tensor]:
        """Return the places (n,) as `place`, and values (n, k); those without a place are in the order of the ranks."""
        index = dim_zero_cat(self.index)
        order = index.argsort(stable=True)
        flat = {name: dim_zero_cat(getattr(self, name)) for name in self.names}
        values = {name: x.view(len(index), x.numel() // max(len(index), 1))[order] for name, x in flat.items()}
        return {"place": index[order], **values}


class PerSample(Metric):
    """Values of single samples by name, in the order of their places in the data set."""

    index: list[Tensor]
    value: list[Tensor]

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self.names = tuple(names)
        for name in ("index", "value"):
            self.add_state(name, [], dist_reduce_fx="cat")
        self.reset()

    def reset(self) -> None:
        """Start with none; a rank may get no sample, and others wait for what it has."""
        super().reset()
        self.index = [torch.zeros(0, dtype=torch.int64, device=self.device)]
        self.value = [torch.zeros(0, len(self.names), dtype=torch.float64, device=self.device)]

    def update(self, index: Tensor, values: Mapping[str, Tensor]) -> None:
        """Add b samples: their places (b,) and, for each name, values (b,)."""
        self.index.append(index)
        columns = [values[name].detach().double() for name in self.names]
        self.value.append(torch.stack(columns, 1) if columns else self.value[0].new_zeros(len(index), 0))

    def compute(self) -> dict[str, Tensor]:
        """The values (n,) float64 of all ranks, and `place`; nothing where a loader numbers no samples.

        Then a place has several of them.
        """
        index, values = dim_zero_cat(self.index), dim_zero_cat(self.value)
        places, order = index.sort()
        if len(places.unique()) < len(places):
            return {}
        return {"place": places, **dict(zip(self.names, values[order].unbind(1), strict=True))}


def compare_logits(logits: Tensor, teacher: Tensor) -> dict[str, Tensor]:
    """How logits (..., classes) follow a teacher's, (...) each: `kl` and `agreement` of `fidelity`."""
    log_q, log_p = (F.log_softmax(widen(x), -1) for x in (logits, teacher))
    log_p = log_p.clamp(min=torch.finfo(log_p.dtype).min)  # of tokens that the teacher lacks; 0 log 0 is 0
    kl = F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)
    return {"kl": kl, "agreement": (logits.argmax(-1) == teacher.argmax(-1)).to(kl.dtype)}


def fidelity(logits: Scored, teacher: Tensor | None, labels: Tensor) -> dict[str, Tensor]:
    """How a net follows its teacher, (b,) each: KL(teacher || net) in nats, and whether both predict the same class.

    Logits (b, ..., classes). Of texts they are means over the tokens that have a label. Nothing without a teacher.
    (Stanton et al., "Does Knowledge Distillation Really Work?", 2021.)
    """
    if isinstance(logits, TokenValues):
        values = dict(logits.beside)
    else:
        values = compare_logits(logits, teacher) if isinstance(logits, Tensor) and teacher is not None else {}
    if labels.ndim == 1:
        return values
    known = label_mask(labels)
    return {name: x.where(known, 0.0).sum(1) / known.sum(1).clamp(min=1) for name, x in values.items()}
