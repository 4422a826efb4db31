"""A server that answers as vLLM's does, by a small net in this process."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

Fault = tuple[int, str]  # a status and a message
MODEL = "tiny/teacher"


class VLLM:
    """What it was asked, and how it answers.

    Attributes:
        url: of its API, once it runs.
        asked: the prompts of each request that it answered, and their headers.
        faults: what it answers first.
        change: makes another answer of one.

    Args:
        net: gives logits (b, T, V) of tokens (b, T).
        decode: gives the text of tokens (n,).
        name: of its model.
    """

    def __init__(self, net: nn.Module, decode: Callable[[torch.Tensor], str], name: str) -> None:
        self.net, self.decode, self.name, self.url = net.eval(), decode, name, ""
        self.asked: list[list[list[int]]] = []
        self.keys: list[str | None] = []
        self.faults: list[Fault] = []
        self.change: Callable[[dict[str, Any]], object] = lambda answer: None

    def models(self) -> dict[str, Any]:
        listed = {"id": self.name, "object": "model", "owned_by": "vllm", "root": self.name, "max_model_len": 64}
        return {"object": "list", "data": [listed]}

    @torch.no_grad()
    def complete(self, request: dict[str, Any]) -> dict[str, Any]:
        assert request.keys() == {"model", "prompt", "max_tokens", "temperature", "prompt_logprobs"}
        self.asked.append(request["prompt"])
        choices = []
        for index, prompt in enumerate(request["prompt"]):
            log_p = F.log_softmax(self.net(torch.tensor([prompt[:-1]]))[0], -1)
            places = [
                self._place(x, token, request["prompt_logprobs"]) for x, token in zip(log_p, prompt[1:], strict=True)
            ]
            rest = {"text": "a", "logprobs": None, "finish_reason": "length", "stop_reason": None}
            choices.append({"index": index, **rest, "prompt_logprobs": [None, *places]})
        answer = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": request["model"]}
        answer |= {"choices": choices[::-1], "usage": {"prompt_tokens": sum(map(len, request["prompt"]))}}
        self.change(answer)
        return answer

    def _place(self, log_p: torch.Tensor, actual: int, k: int) -> dict[str, Any]:
        """The text's token first, then the k likeliest, one of which it may be."""
        tokens = log_p.topk(k).indices
        ranks = {actual: int((log_p >= log_p[actual]).sum())}
        ranks |= {int(token): place + 1 for place, token in enumerate(tokens)}
        return {
            str(token): {
                "logprob": float(log_p[token]), "rank": rank, "decoded_token": self.decode(torch.tensor([token]))
            }
            for token, rank in ranks.items()
        }  # fmt: skip


@contextmanager
def serve(net: nn.Module, decode: Callable[[torch.Tensor], str], name: str = MODEL) -> Iterator[VLLM]:
    """Inside, it answers on a free port."""
    ours = VLLM(net, decode, name)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(ours.models)

        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self._answer(lambda: ours.complete(request))

        def _answer(self, answer: Callable[[], dict[str, Any]]) -> None:
            ours.keys.append(self.headers["Authorization"])
            status, content = 200, dict[str, Any]()
            if ours.faults:
                status, message = ours.faults.pop(0)
                content = {"error": {"message": message, "type": "Error", "param": None, "code": status}}
            body = json.dumps(content or answer()).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        ours.url = f"http://127.0.0.1:{server.server_port}/v1"
        yield ours
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
