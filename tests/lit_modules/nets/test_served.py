"""What a server tells of a text's tokens, and what is refused of it."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from apprentice.errors import BadInput
from datamodules import Vocabulary
from lit_modules.nets import Served, served
from tests.commands import bad_input
from tests.language import gpt
from tests.servers import MODEL, VLLM, serve

VOCABULARY = Vocabulary("abcdefghijk")
TEXTS = [[1, 2, 3, 4, 5], [7, 0, 10]]
K = 4


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[VLLM]:
    monkeypatch.setattr(served, "WAITS", (0.0, 0.0))
    with serve(gpt(11), VOCABULARY.decode) as running:
        yield running


def ask(server: VLLM) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return Served(server.url, MODEL, 11, 16).top_tokens(TEXTS, K, VOCABULARY.decode)


def test_likeliest_tokens_are_those_of_the_net(server: VLLM) -> None:
    server.faults += [(500, "broken"), (429, "busy")]
    Served(f"{server.url}/", MODEL, 11, 16).check()
    for text, (log_p, tokens) in zip(TEXTS, ask(server), strict=True):
        with torch.no_grad():
            values, likeliest = F.log_softmax(server.net(torch.tensor([text[:-1]]))[0], -1).topk(K)
        assert torch.equal(log_p, values.double())
        assert torch.equal(tokens, likeliest)


def first(answer: dict[str, Any]) -> dict[str, Any]:
    """What an answer says of the second token of the last text that it has, which is the first that was sent."""
    place: dict[str, Any] = answer["choices"][-1]["prompt_logprobs"][1]
    return place


def swap(answer: dict[str, Any], **changes: Any) -> None:
    """Change what is said of the likeliest token."""
    next(entry for entry in first(answer).values() if entry["rank"] == 1).update(changes)


CHANGES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "no log-probabilities": (lambda a: a["choices"][0].update(prompt_logprobs=None), "each token; it has 0 of 3"),
    "a token fewer": (lambda a: a["choices"][0]["prompt_logprobs"].pop(), "each token; it has 2 of 3"),
    "a text fewer": (lambda a: a["choices"].pop(), "`prompt_logprobs` of each prompt; what it tells has no 0"),
    "no entry": (lambda a: a["choices"][0]["prompt_logprobs"].__setitem__(1, None), "each prompt"),
    "not this text": (lambda a: first(a).pop("2"), "the text's token and the 4 likeliest"),
    "fewer tokens": (
        lambda a: [first(a).pop(x) for x in [*first(a)] if x != "2"],
        "likeliest in each place; one has 1",
    ),
    "a sample": (lambda a: swap(a, rank=9), "the 4 likeliest tokens of each place; it has one of rank 5 or more"),
    "above one": (lambda a: swap(a, logprob=0.5), "log-probabilities, at most 0"),
    "no number": (lambda a: swap(a, logprob=float("nan")), "log-probabilities, at most 0"),
    "another vocabulary": (lambda a: first(a).update({"11": first(a)["2"]}), "its token 11 is none of the data's 11"),
    "other texts": (lambda a: swap(a, decoded_token="?"), "is '?', and the data's "),
}


@pytest.mark.parametrize("case", CHANGES)
def test_an_answer_that_does_not_fit_is_refused(case: str, server: VLLM) -> None:
    server.change, line = CHANGES[case]
    message = bad_input(ask, server)
    assert line in message
    assert message.startswith(("teacher.url http://127.0.0.1", f"teacher.model {MODEL}: expected a model with the tok"))


@pytest.mark.parametrize(
    ("faults", "line"),
    [
        ([(400, "prompt logprobs of 4,\nwhich is greater than 2")], "400, prompt logprobs of 4, which is greater than"),
        ([(401, "Unauthorized")], "401, Unauthorized"),
        ([(503, "starts")] * 3, "503, starts"),
    ],
)
def test_a_refusal_is_told_in_the_servers_words(faults: Any, line: str, server: VLLM) -> None:
    server.faults += faults
    assert bad_input(
        ask, server
    ) == f"teacher.url {server.url}: expected a server that answers completions; it says: " + (
        line if faults[0][0] != 400 else f"{line} 2"
    )
    assert server.faults == []


def test_a_server_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served, "WAITS", (0.0,))
    with serve(gpt(11), VOCABULARY.decode) as server:
        pass
    with pytest.raises(BadInput, match=r"a server that answers models; it says: .*refused"):
        Served(server.url, MODEL, 11, 16).check()
