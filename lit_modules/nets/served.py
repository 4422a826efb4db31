"""A teacher behind a server of vLLM, which tells the log-probabilities of a prompt's likeliest tokens alone."""

import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Collection, Mapping, Sequence
from http.client import HTTPException
from typing import Any, NoReturn
from urllib.parse import urlsplit

import torch
from torch import Tensor

from apprentice.errors import BadInput, reason
from lit_modules.nets.outputs import Outputs
from lit_modules.nets.stored import TeacherInFile

KEY = "VLLM_API_KEY"  # the environment variable that the server itself reads
WAITS = 1.0, 2.0, 4.0, 8.0, 16.0, 32.0  # seconds before each further try
TIMEOUT = 600.0  # seconds of a request
BUSY = 429
ROUNDING = 1e-4  # of a log-probability, in float32 by other kernels
BROKEN = "\N{REPLACEMENT CHARACTER}"  # in the text of a token that is a part of a character

Decode = Callable[[Tensor], str]  # the text of tokens (n,)


class Served(TeacherInFile):
    """A language model behind an OpenAI-compatible server that takes token ids and `prompt_logprobs`, as vLLM does.

    It has no weights here, and is neither tested nor asked for texts. `teacher_top_k` tokens of it are stored for each
    place that is learned: `teacher_cache_dir`. What is stored goes by the name of the model, not by the server's
    address. A key is read from the environment variable VLLM_API_KEY, and written nowhere.

    Args:
        url: of the API, as http://HOST:8000/v1.
        model: its name there. Its tokens are those of `data.tokenizer`.
        vocab_size: number of tokens, V.
        block_size: tokens of a text at most, T.
    """

    def __init__(self, url: str, model: str, vocab_size: int, block_size: int) -> None:
        super().__init__()
        address = urlsplit(url)
        if address.scheme not in {"http", "https"} or not address.hostname:
            raise BadInput("url", url, "an address of an API, as http://HOST:8000/v1")
        if address.username or address.password or address.query:
            raise BadInput("url", "an address with a key in it", f"the environment variable {KEY} for a key")
        self.url, self.model, self.vocab_size = url.rstrip("/"), model, vocab_size
        self._compared: set[int] = set()  # tokens whose texts are those of the data

    @property
    def teacher(self) -> str:
        """What tells it from other teachers."""
        return f"served {self.model}"

    def zeros(self, inputs: Tensor, layers: Collection[str] = ()) -> Outputs:
        """Return zeros (B, T, V) in the place of logits of tokens (B, T), for checks of shapes."""
        return Outputs(torch.zeros(*inputs.shape, self.vocab_size, device=inputs.device), {})

    def forward(self, tokens: Tensor) -> NoReturn:
        raise BadInput("teacher", "Served", "a net with weights; a server tells of the training texts alone")

    def rows(self, part: str, index: Tensor, layers: Collection[str] = ()) -> NoReturn:
        raise BadInput("teacher", "Served", "`teacher_top_k N` beside it: so many tokens of it are stored")

    def check(self) -> None:
        """Raise BadInput if the server can't be reached, or does not have the model."""
        listed = self._send("models")
        names = [str(model.get("id")) for model in listed.get("data", [])]
        if self.model not in names:
            raise BadInput("teacher.model", self.model, f"a model of {self.url}: {', '.join(names) or 'it has none'}")

    def top_tokens(self, texts: Sequence[Sequence[int]], k: int, decode: Decode | None) -> list[tuple[Tensor, Tensor]]:
        """Ask for the k likeliest tokens in each place but the first of texts, n tokens each.

        `decode` gives the text of tokens as the data has it; None to take the server's tokens for the same.

        Returns:
            For each text log-probabilities (n - 1, k) float64, the largest first, and their tokens (n - 1, k) int64.

        Raises:
            BadInput: the server can't be reached, refuses, has other tokens, or answers with anything else.
        """
        request = {"model": self.model, "prompt": texts, "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": k}
        answer = self._send("completions", request)
        try:
            by_index = {choice["index"]: choice["prompt_logprobs"] or [] for choice in answer["choices"]}
            return [self._read(by_index[number], text, k, decode) for number, text in enumerate(texts)]
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            if isinstance(error, BadInput):
                raise
            self._refuse_answer(f"`prompt_logprobs` of each prompt; what it tells has no {error}")

    def _read(self, places: Sequence[Any], text: Sequence[int], k: int, decode: Decode | None) -> tuple[Tensor, Tensor]:
        if len(places) != len(text):
            self._refuse_answer(f"`prompt_logprobs` of each token; it has {len(places):,} of {len(text):,}")
        shape = len(text) - 1, k
        log_p, tokens = torch.empty(shape, dtype=torch.float64), torch.empty(shape, dtype=torch.int64)
        for number, (place, actual) in enumerate(zip(places[1:], text[1:], strict=True)):
            entries = {int(token): entry for token, entry in place.items()}
            if actual not in entries or len(entries) < k:
                self._refuse_answer(f"the text's token and the {k} likeliest in each place; one has {len(entries)}")
            if not all(entry["logprob"] <= ROUNDING for entry in entries.values()):
                self._refuse_answer("log-probabilities, at most 0")
            self._compare_texts(entries, decode)
            likeliest = sorted(entries.items(), key=lambda item: (-item[1]["logprob"], item[1].get("rank") or 0))[:k]
            tokens[number] = torch.tensor([token for token, _ in likeliest])
            log_p[number] = torch.tensor([entry["logprob"] for _, entry in likeliest])
            if any((entry.get("rank") or 0) > k for _, entry in likeliest):
                self._refuse_answer(f"the {k} likeliest tokens of each place; it has one of rank {k + 1} or more")
        if (log_p.exp().sum(1) > 1 + k * ROUNDING).any():
            self._refuse_answer("log-probabilities of no more than 1 in all")
        return log_p.clamp(max=0), tokens

    def _compare_texts(self, entries: Mapping[int, Any], decode: Decode | None) -> None:
        """Raise BadInput for a token that the data has not, or with another text; parts of characters have none."""
        for token, entry in entries.items():
            if not 0 <= token < self.vocab_size:
                self._refuse_tokens(f"its token {token:,} is none of the data's {self.vocab_size:,}")
            if token in self._compared:
                continue
            self._compared.add(token)
            theirs = entry.get("decoded_token")
            if decode is None or not theirs or BROKEN in theirs:
                continue
            ours = decode(torch.tensor([token]))
            if ours and BROKEN not in ours and ours.strip() != theirs.strip():
                self._refuse_tokens(f"its token {token:,} is {theirs!r}, and the data's {ours!r}")

    def _refuse_tokens(self, why: str) -> NoReturn:
        raise BadInput("teacher.model", self.model, f"a model with the tokens of `data.tokenizer`: {why}")

    def _refuse_answer(self, expected: str) -> NoReturn:
        raise BadInput("teacher.url", self.url, f"a server that tells, as vLLM does, {expected}")

    def _send(self, path: str, content: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return what the server answers; try again where it is not there, busy or broken."""
        body = None if content is None else json.dumps(content).encode()
        request = urllib.request.Request(f"{self.url}/{path}", body, {"Content-Type": "application/json"})
        if key := os.environ.get(KEY):
            request.add_unredirected_header("Authorization", f"Bearer {key}")
        for wait in (*WAITS, None):
            try:
                with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
                    answer = json.load(response)
            except urllib.error.HTTPError as error:
                why = f"{error.code}, {_message(error)}"
                if error.code < 500 and error.code != BUSY:
                    break
            except (OSError, HTTPException) as error:
                why = reason(error)
            except ValueError:
                why = "what it answers is no JSON"
                break
            else:
                if isinstance(answer, dict):
                    return answer
                why = "what it answers is no JSON object"
                break
            if wait is not None:
                time.sleep(wait)
        raise BadInput("teacher.url", self.url, f"a server that answers {path}; it says: {why}")


def _message(error: urllib.error.HTTPError) -> str:
    """Return what a server says of an error, in one line."""
    try:
        content = json.loads(error.read())
        message = content.get("message") or content["error"]["message"]
    except (OSError, ValueError, LookupError, AttributeError, TypeError):
        message = error.reason
    return " ".join(str(message).split())[:300]
