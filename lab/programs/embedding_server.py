"""Data parallelism with an embedding on a server: trainers look words up by RPC, and DDP averages the rest.

    torchrun --standalone --nproc_per_node 4 -m lab.programs.embedding_server    # two trainers, the server, the master

As PyTorch's tutorial on DDP with RPC: an embedding too large for each trainer lies on one process alone; the trainers
have a dense layer, which DDP replicates, and share the rows of a batch; the master starts all and waits. Distributed
autograd goes back through the lookup to the server.

There each trainer's optimizer steps the embedding as soon as its own gradient has come, so the numbers depend on who is
first. Here the server waits for all, averages in the order of the ranks, as DDP does, and steps once: any number of
trainers ends with the weights of one process.
"""

import os
import threading
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import autograd, rpc
from torch.futures import Future
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from apprentice.keyed import with_seed

WORDS, WIDTH, CLASSES, TEXT = 100, 16, 4, 5  # of the vocabulary, an embedding, the labels, a text
ROWS, STEPS = 13, 20  # of a batch; of the training
LEARNING_RATE = 0.1


def make_layers() -> tuple[nn.EmbeddingBag, nn.Linear]:
    """Return the layers that every process starts from, in float64."""
    layers = with_seed(0, lambda: (nn.EmbeddingBag(WORDS, WIDTH, mode="sum"), nn.Linear(WIDTH, CLASSES)))
    return layers[0].double(), layers[1].double()


def make_batch(step: int) -> tuple[Tensor, Tensor]:
    """Return texts, (ROWS, TEXT) int64 words, and labels, (ROWS,): each class has words of its own."""
    words = with_seed(step, lambda: torch.randint(WORDS // CLASSES, (ROWS, TEXT)))
    labels = torch.arange(ROWS) % CLASSES
    return words * CLASSES + labels[:, None], labels


def train_alone() -> tuple[list[float], dict[str, Tensor]]:
    """Train in this process; return the losses and the weights."""
    net = nn.Sequential(*make_layers())
    optimizer = torch.optim.SGD(net.parameters(), LEARNING_RATE)
    losses = []
    for step in range(STEPS):
        texts, labels = make_batch(step)
        loss = F.cross_entropy(net(texts), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, net.state_dict()


class Server:
    """The embedding, and the gradients of a step that have come.

    Args:
        trainers: how many there are.
    """

    def __init__(self, trainers: int) -> None:
        self.embedding, _ = make_layers()
        self._optimizer = torch.optim.SGD(self.embedding.parameters(), LEARNING_RATE)
        self._trainers = trainers
        self._gradients: dict[int, Tensor] = {}
        self._lock = threading.Lock()  # calls arrive in several threads
        self._stepped: Future = Future()

    def step(self, rank: int, context: int) -> Future:
        """Return the future step, which is taken when the gradients of all trainers have come."""
        weight = self.embedding.weight
        with self._lock:
            answer = self._stepped
            self._gradients[rank] = autograd.get_gradients(context)[weight]
            if len(self._gradients) == self._trainers:
                weight.grad = torch.stack([self._gradients[r] for r in range(self._trainers)]).mean(0)
                self._optimizer.step()
                self._gradients.clear()
                self._stepped = Future()
                answer.set_result(None)
        return answer


# Called at the server


def look_up(server: Any, texts: Tensor) -> Tensor:
    """Return the sums of the words' vectors, (b, TEXT) -> (b, WIDTH)."""
    vectors: Tensor = server.local_value().embedding(texts)
    return vectors


@rpc.functions.async_execution
def step_embedding(server: Any, rank: int, context: int) -> Future:
    """Step with the gradients that all trainers have in their contexts of distributed autograd."""
    return server.local_value().step(rank, context)


def embedding_weight(server: Any) -> Tensor:
    """Return the table, (WORDS, WIDTH)."""
    return server.local_value().embedding.weight.detach()


# Called at a trainer


def train(server: Any, rank: int, trainers: int) -> tuple[list[float], dict[str, Tensor]]:
    """Train on this rank's rows of each batch; return its shares of the losses, and the dense layer's weights."""
    dense = DistributedDataParallel(make_layers()[1], process_group=_group[0])
    optimizer = torch.optim.SGD(dense.parameters(), LEARNING_RATE)
    losses = []
    for step in range(STEPS):
        texts, labels = (x[rank::trainers] for x in make_batch(step))
        with autograd.context() as context:
            vectors = rpc.rpc_sync(server.owner(), look_up, args=(server, texts))
            share = F.cross_entropy(dense(vectors), labels, reduction="sum") / ROWS
            autograd.backward(context, [share * trainers])  # DDP takes the mean over trainers, the server too
            gradients = autograd.get_gradients(context)
            for p in dense.parameters():
                p.grad = gradients[p]
            optimizer.step()
            rpc.rpc_sync(server.owner(), step_embedding, args=(server, rank, context))
        losses.append(share.item())
    return losses, dense.module.state_dict()


_group: list[Any] = []  # the trainers', for DDP


def lead(trainers: int) -> tuple[list[float], dict[str, Tensor]]:
    """Make the server's part and have all trainers train; return the losses and the weights, as `train_alone`."""
    server = rpc.remote("server", Server, args=(trainers,))
    calls = [rpc.rpc_async(f"trainer{r}", train, args=(server, r, trainers)) for r in range(trainers)]
    shares, weights = zip(*(call.wait() for call in calls), strict=True)
    table = rpc.rpc_sync("server", embedding_weight, args=(server,))
    return [sum(parts) for parts in zip(*shares, strict=True)], {
        "0.weight": table,
        **{f"1.{name}": value for name, value in weights[0].items()},
    }


def main(_argv: Sequence[str] | None = None) -> None:
    """Be a trainer, the server (last but one) or the master (the last), which prints the losses."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    trainers = size - 2
    dist.init_process_group("gloo")
    _group[:] = [dist.new_group(range(trainers))]
    name = f"trainer{rank}" if rank < trainers else "server" if rank == trainers else "master"
    rpc.init_rpc(name, rank=rank, world_size=size)
    if name == "master":
        losses, weights = lead(trainers)
        right, expected = train_alone()
        for step in range(0, STEPS, 5):
            print(f"loss {losses[step]:.4f}, in one process {right[step]:.4f}")
        print(f"largest difference of a weight below 1e-12: {largest_difference(weights, expected) < 1e-12}")
    rpc.shutdown()
    dist.destroy_process_group()


def largest_difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Return the largest difference of two equal values of weights."""
    return max((one[name] - other[name]).abs().max().item() for name in one.keys() | other.keys())


if __name__ == "__main__":
    main()
