"""Batches of texts that students have written."""

from typing import Any, cast

import torch
from torch import Tensor

from apprentice.batch import IGNORED, Batch, label_mask
from lit_modules.nets.generation import Generated
from lit_modules.nets.outputs import Outputs

SIZES = 4  # numbers of `text_sizes`


def text_sizes(texts: Batch) -> Tensor:
    """Return (4,) int64, what computing texts (b, T) costs is a sum of: b, b T, b T^2, and their labels that count."""
    rows, length = texts.inputs.shape
    labels = label_mask(texts.labels).sum()
    return torch.stack([*labels.new_tensor([rows, rows * length, rows * length**2]), labels])


def cut_outputs(outputs: Outputs, rows: slice, width: int, columns: int) -> Outputs:
    """Return some rows of what a net gave, for texts that were padded to a width of the first columns."""

    def cut(x: Tensor) -> Tensor:
        x = x[rows]
        return x[:, :columns] if x.dim() > 1 and x.shape[1] == width else x

    return outputs.map(cut)


def cut_texts(texts: Generated, prompts: Tensor, longest: int | None) -> Generated:
    """Cut responses to prompts of so many tokens (b,) where both together are longer than a net's texts."""
    if longest is None:
        return texts
    return texts._replace(lengths=texts.lengths.minimum((longest - prompts).clamp(min=0)))


def cut_before(texts: Generated, tokens: Tensor) -> Generated:
    """Cut responses before the first of some tokens (n,)."""
    places = torch.arange(texts.tokens.shape[1], device=texts.tokens.device)
    ends = torch.isin(texts.tokens, tokens.to(places.device)) & (places < texts.lengths[:, None])
    return texts._replace(lengths=ends.int().argmax(1).where(ends.any(1), texts.lengths))


def normalize_by_tokens(texts: Batch, share: float) -> Batch:
    """Return texts with their `label_weight`, given the rows of the global batch for each token, or text, that counts.

    Texts count alike where those of the data do.
    """
    weight, counts = texts.inputs.shape[1] * share, label_mask(texts.labels)
    if not isinstance(texts.label_weight, Tensor):
        return texts._replace(label_weight=weight)
    return texts._replace(label_weight=counts * (weight / counts.sum(1, keepdim=True).clamp(min=1).double()))


def build_batch(batch: Batch, prompts: Tensor, written: Generated) -> Batch:
    """Return the rows with the prompts, of `prompts` (b,) tokens, and what was written; all of that is learned."""
    ends = prompts + written.lengths
    width = max(int(ends.max()) if len(ends) else 0, 2)
    places = torch.arange(width, device=prompts.device)
    of_prompt = batch.inputs.long().gather(1, places.clamp(max=batch.inputs.shape[1] - 1).expand(len(ends), -1))
    new = (places - prompts[:, None]).clamp(0, written.tokens.shape[1] - 1)
    text = of_prompt.where(places < prompts[:, None], written.tokens.gather(1, new))
    counts = (places >= prompts[:, None]) & (places < ends[:, None])
    labels = text.where(counts, IGNORED)[:, 1:]
    kept = {"mixed": None, "class_weights": None, "is_written": True}
    return batch._replace(inputs=text[:, :-1], labels=labels, **cast("Any", kept))
