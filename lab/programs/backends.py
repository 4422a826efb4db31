"""Which backend of torch.distributed has which function: asked of torch, by trying each in two processes.

    torchrun --standalone --nproc_per_node 2 -m lab.programs.backends

Each function runs in a group of its own, on tensors of the CPU and, where there is a GPU for each process, of that. It
is there if both processes end with the right values. A backend that this torch or machine can't start has a line with
torch's reason.
"""

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lab.strategies import ring

BACKENDS = ("gloo", "ring", "nccl", "mpi", "ucc")
TIMEOUT = timedelta(seconds=20)  # of a function that the other process does not take part in
Try = Callable[[dist.ProcessGroup, Tensor], bool]  # a group and this rank's [rank + 1.0]: whether the result is right


def main(_argv: Sequence[str] | None = None) -> None:
    """Print a table: a line for a function, a column for a backend that starts."""
    ring.register()
    dist.init_process_group("gloo", timeout=TIMEOUT)
    rank = dist.get_rank()
    columns, absent = {}, {}
    for backend in BACKENDS:
        for device in devices():
            name = backend if device.type == "cpu" else f"{backend}, GPU"
            if reason := refusal(backend):
                absent[backend] = reason
            else:
                columns[name] = {function: ask(backend, attempt, device) for function, attempt in FUNCTIONS.items()}
    if rank == 0:
        print("| function |", " | ".join(columns), "|")
        print("| :-- |", " | ".join(":-:" for _ in columns), "|")
        for function in FUNCTIONS:
            print(f"| {function} |", " | ".join(column[function] for column in columns.values()), "|")
        print("", *(f"{backend}: {reason}" for backend, reason in absent.items()), sep="\n")
    dist.destroy_process_group()


def devices() -> list[torch.device]:
    """Return the CPU, and this process's GPU if each has one."""
    local = int(os.environ.get("LOCAL_RANK", "0"))
    has_gpus = torch.cuda.device_count() >= dist.get_world_size()
    return [torch.device("cpu"), *([torch.device("cuda", local)] if has_gpus else [])]


def refusal(backend: str) -> str:
    """Return why a group of this backend can't be made; "" where it can."""
    try:
        dist.new_group(backend=backend, timeout=TIMEOUT)
    except (RuntimeError, ValueError) as error:
        return str(error).splitlines()[0]
    return ""


def ask(backend: str, attempt: Try, device: torch.device) -> str:
    """Return "yes" if the function gives the right values in all ranks, "wrong" if it gives others, or "no"."""
    group: Any = dist.new_group(backend=backend, timeout=TIMEOUT)
    try:
        answer = 2 if attempt(group, torch.full((1,), dist.get_rank() + 1.0, device=device)) else 1
    except Exception:  # noqa: BLE001 - what a backend lacks, it says by any exception
        answer = 0
    worst = torch.tensor(answer)
    dist.all_reduce(worst, dist.ReduceOp.MIN)
    return ("no", "wrong", "yes")[int(worst)]


# Functions of two ranks, which hold 1 and 2


def _send(group: dist.ProcessGroup, x: Tensor) -> bool:
    if dist.get_rank():
        dist.recv(x, 0, group)
    else:
        dist.send(x, 1, group)
    return x.item() == 1


def _receive_from_any(group: dist.ProcessGroup, x: Tensor) -> bool:
    if dist.get_rank():
        return dist.recv(x, None, group) == 0 and x.item() == 1
    dist.send(x, 1, group)
    return True


def _shift(group: dist.ProcessGroup, x: Tensor) -> bool:
    y, other = torch.zeros_like(x), 1 - dist.get_rank()
    calls = [dist.P2POp(dist.isend, x, other, group), dist.P2POp(dist.irecv, y, other, group)]
    for work in dist.batch_isend_irecv(calls):
        work.wait()
    return y.item() == other + 1


def _broadcast(group: dist.ProcessGroup, x: Tensor) -> bool:
    dist.broadcast(x, 0, group)
    return x.item() == 1


def _reduction(operation: dist.ReduceOp.RedOpType, expected: float, dtype: torch.dtype = torch.float32) -> Try:
    def attempt(group: dist.ProcessGroup, x: Tensor) -> bool:
        y = x.to(dtype)
        dist.all_reduce(y, operation, group)
        return y.item() == expected

    return attempt


def _reduce(group: dist.ProcessGroup, x: Tensor) -> bool:
    dist.reduce(x, 0, group=group)
    return dist.get_rank() == 1 or x.item() == 3


def _sparse(group: dist.ProcessGroup, x: Tensor) -> bool:
    y = torch.sparse_coo_tensor(torch.tensor([[dist.get_rank()]], device=x.device), x, (2,), check_invariants=True)
    dist.all_reduce(y, group=group)
    return y.to_dense().tolist() == [1, 2]


def _all_gather(group: dist.ProcessGroup, x: Tensor) -> bool:
    parts = [torch.zeros_like(x) for _ in range(2)]
    dist.all_gather(parts, x, group)
    return torch.cat(parts).tolist() == [1, 2]


def _all_gather_into_tensor(group: dist.ProcessGroup, x: Tensor) -> bool:
    y = x.new_zeros(2)
    dist.all_gather_into_tensor(y, x, group)
    return y.tolist() == [1, 2]


def _gather(group: dist.ProcessGroup, x: Tensor) -> bool:
    parts = [torch.zeros_like(x) for _ in range(2)] if dist.get_rank() == 0 else None
    dist.gather(x, parts, 0, group)
    return parts is None or torch.cat(parts).tolist() == [1, 2]


def _scatter(group: dist.ProcessGroup, x: Tensor) -> bool:
    dist.scatter(x, [x.new_tensor([5]), x.new_tensor([6])] if dist.get_rank() == 0 else None, 0, group)
    return x.item() == 5 + dist.get_rank()


def _reduce_scatter(group: dist.ProcessGroup, x: Tensor) -> bool:
    y = torch.zeros_like(x)
    dist.reduce_scatter(y, [x, 10 * x], group=group)
    return y.item() == (3, 30)[dist.get_rank()]


def _reduce_scatter_tensor(group: dist.ProcessGroup, x: Tensor) -> bool:
    y = torch.zeros_like(x)
    dist.reduce_scatter_tensor(y, torch.cat([x, 10 * x]), group=group)
    return y.item() == (3, 30)[dist.get_rank()]


def _all_to_all(group: dist.ProcessGroup, x: Tensor) -> bool:
    parts = [torch.zeros_like(x) for _ in range(2)]
    dist.all_to_all(parts, [x, 10 * x], group)
    return torch.cat(parts).tolist() == ([1, 2], [10, 20])[dist.get_rank()]


def _all_to_all_single(group: dist.ProcessGroup, x: Tensor) -> bool:
    y = x.new_zeros(2)
    dist.all_to_all_single(y, torch.cat([x, 10 * x]), group=group)
    return y.tolist() == ([1, 2], [10, 20])[dist.get_rank()]


def _barrier(group: dist.ProcessGroup, _x: Tensor) -> bool:
    dist.barrier(group)
    return True


def _monitored_barrier(group: dist.ProcessGroup, _x: Tensor) -> bool:
    dist.monitored_barrier(group)
    return True


FUNCTIONS: dict[str, Try] = {
    "`send`, `recv`": _send,
    "`recv` from any rank": _receive_from_any,
    "`batch_isend_irecv`": _shift,
    "`broadcast`": _broadcast,
    "`all_reduce`, SUM": _reduction(dist.ReduceOp.SUM, 3),
    "`all_reduce`, MAX": _reduction(dist.ReduceOp.MAX, 2),
    "`all_reduce`, AVG": _reduction(dist.ReduceOp.AVG, 1.5),
    "`all_reduce`, bitwise AND": _reduction(dist.ReduceOp.BAND, 0, torch.int64),
    "`all_reduce`, bfloat16": _reduction(dist.ReduceOp.SUM, 3, torch.bfloat16),
    "`all_reduce`, sparse": _sparse,
    "`reduce`": _reduce,
    "`all_gather`": _all_gather,
    "`all_gather_into_tensor`": _all_gather_into_tensor,
    "`gather`": _gather,
    "`scatter`": _scatter,
    "`reduce_scatter`": _reduce_scatter,
    "`reduce_scatter_tensor`": _reduce_scatter_tensor,
    "`all_to_all`": _all_to_all,
    "`all_to_all_single`": _all_to_all_single,
    "`barrier`": _barrier,
    "`monitored_barrier`": _monitored_barrier,
}

if __name__ == "__main__":
    main()
