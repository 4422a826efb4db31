"""What a trained language model writes after a prompt."""

import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from apprentice.errors import BadInput
from datamodules.text.vocabulary import Subwords, Vocabulary
from harness.reports.results import load_results
from harness.runs.nets import load_net
from harness.studies.text.vocabularies import read_vocabulary
from lit_modules.nets.attention.form import any_kernel
from lit_modules.nets.generation import Sampling, generate, longest_text, row_keys
from lit_modules.nets.gpt import GPT
from lit_modules.nets.hugging_face import HuggingFaceLM

WRITTEN = 128  # tokens at most that a model of others writes after a prompt
NAME = "gpt"  # of the experiment, of its fit and of the net's folder


def write_samples(folder: Path, prompt: str, config: Namespace) -> list[str]:
    """Continue the prompt by the net in a folder."""
    net: Any = load_net(folder)
    return _continue(net, read_vocabulary(folder), config, prompt, net.init_args["block_size"])


def _continue(
    net: Any, vocabulary: Vocabulary | Subwords, config: Namespace, prompt: str, block_size: int | None = None
) -> list[str]:
    """Continue a prompt by `sample_tokens`, by default to a text of `block_size` or, without one, by WRITTEN."""
    tokens, longest, new = vocabulary.encode(prompt, "sample"), longest_text(net), config.sample_tokens
    if new is None and block_size is not None:
        new, longest = max(block_size - len(tokens), 0), longest and block_size
    longest = longest or sys.maxsize
    if not 1 <= len(tokens) <= longest:
        raise BadInput("sample", repr(prompt), f"1 to {longest} tokens, the net's block size; not {len(tokens)}")
    new = min(WRITTEN if new is None else new, longest - len(tokens))
    with any_kernel(net):  # on the CPU, wherever the net was trained
        if isinstance(net, GPT):
            drawing = {"temperature": config.temperature, "top_k": config.top_k, "seed": config.sample_seed}
            texts = [*net.generate(tokens.expand(config.samples, -1), new, **drawing)]
        else:
            texts = _draw(net, vocabulary, tokens, new, config)
    return [vocabulary.decode(text) for text in texts]


def _draw(net: Any, vocabulary: Vocabulary | Subwords, prompt: Tensor, most: int, config: Namespace) -> list[Tensor]:
    """Continue a prompt (t,) by `most` tokens at most, up to the end token; return texts (t + new,)."""
    samples, sampling = torch.arange(config.samples), Sampling(config.temperature, config.top_k)
    end = vocabulary.tokenizer.eos_token_id if isinstance(vocabulary, Subwords) else None
    ends, lengths = [] if end is None else [end], torch.full_like(samples, len(prompt))
    keys = row_keys(samples, config.sample_seed)
    drawn = generate(net, prompt.expand(config.samples, -1), lengths, most, keys, sampling, ends)
    pairs = zip(drawn.tokens, drawn.lengths.tolist(), strict=True)
    return [torch.cat([prompt, tokens[:length]]) for tokens, length in pairs]


def sample(config: Namespace) -> Sequence[str]:
    """Continue `sample` by the net in `run`; BadInput if one can't be used.

    `run` is a run of gpt.py, whose first seed's net is taken, a net's folder as RUN/seed0/kd, or the
    folder of a model of transformers.
    """
    folder = Path(config.run)
    if (folder / "net.yaml").is_file():
        return write_samples(folder, config.sample, config)
    if (folder / "config.json").is_file():
        try:
            vocabulary = Subwords(config.run)
            net = HuggingFaceLM(config.run, len(vocabulary), 1, pretrained=True).eval()
        except BadInput as fault:
            raise BadInput("run", config.run, fault.expected) from None
        return _continue(net, vocabulary, config, config.sample)
    results = load_results(config.run)
    if results["experiment"] != NAME:
        of_kd = f"; or one of its nets' folders, as {folder}/seed0/kd" if results["experiment"] == "kd" else ""
        raise BadInput("run", config.run, f"a run of gpt.py; this one is of {results['experiment']}.py{of_kd}")
    return write_samples(folder / f"seed{results['seeds'][0]}" / NAME, config.sample, config)
