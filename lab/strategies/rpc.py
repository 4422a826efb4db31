"""Strategies over torch.distributed.rpc: an agent in each rank, calls between ranks, and workers of a master."""

import atexit
import logging
import queue
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.distributed import rpc
from torch.futures import Future
from torch.optim import LBFGS, Optimizer

from apprentice.errors import BadInput
from apprentice.private import tree_map_only
from strategies.base.data_parallel import DataParallel
from strategies.base.gradients import parameters_of
from strategies.base.launchers import ForkLauncher
from strategies.base.private import default_store, sync_module_states

SCHEME = "apprentice"  # of an init_method that stands for the process group's store
SHUTDOWN_TIMEOUT = 10.0  # seconds for a graceful shutdown of all agents
PING_INTERVAL = 1.0  # seconds


class RPCStrategy(DataParallel):
    """Runs an RPC agent in each rank, from `_start_agent` until the ranks end."""

    rpc_name: str
    _relates_rows = False
    _has_whole_nets = False

    def _check_devices(self) -> None:
        super()._check_devices()
        if not rpc.is_available():
            expected = "a torch with torch.distributed.rpc, which this one was built without"
            raise BadInput("strategy", self.rpc_name, expected)

    def check_module(self, module: LightningModule) -> None:
        super().check_module(module)
        if not module.automatic_optimization:
            raise BadInput("strategy", self.rpc_name, f"automatic optimization of {type(module).__name__}")
        if self._scales_loss:
            raise BadInput("precision", "16-mixed", f"one without a loss scale, as bf16-mixed, for {self.rpc_name}")

    def _check_optimizers(self) -> None:
        """Raise BadInput where an optimizer calls its closure several times a step."""
        if any(isinstance(optimizer, LBFGS) for optimizer in self.optimizers):
            raise BadInput("strategy", self.rpc_name, "an optimizer other than LBFGS, which needs the loss")

    def configure_ddp(self) -> None:
        """Start with rank zero's states, without a wrapper."""
        sync_module_states(self._module)

    def _start_agent(self, receiver: Any) -> None:
        """Start this rank's agent, unless an earlier fit has; `receiver` is what other ranks' calls find here."""
        _receiver[:] = [receiver]
        if rpc._is_current_rpc_agent_set():
            rpc._set_rpc_timeout(self._timeout_seconds)
        else:
            with suppress(RuntimeError):  # it is registered already
                dist.register_rendezvous_handler(SCHEME, _process_groups_store)
            options = rpc.TensorPipeRpcBackendOptions(init_method=f"{SCHEME}://", rpc_timeout=self._timeout_seconds)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "You are using a Backend", UserWarning)  # torch's use of one
                rank, count = self.global_rank, self._num_ranks
                rpc.init_rpc(f"rank{rank}", rank=rank, world_size=count, rpc_backend_options=options)
            atexit.register(_stop_at_exit)
        self.barrier()  # an agent that runs since an earlier fit does not mean that its rank is ready

    def _catch_up(self) -> None:
        """Load the newest parameters and buffers where this rank is behind; collective."""

    def on_validation_start(self) -> None:
        self._catch_up()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the newest state; collective."""
        self._catch_up()
        return super().lightning_module_state_dict()

    def on_train_end(self) -> None:
        """Wait until all ranks have their last results: a rank that ends sends none."""
        self._catch_up()
        self.barrier()

    def on_exception(self, exception: BaseException) -> None:
        """Stop the agent at once: others may wait for a result."""
        _stop(graceful=False)
        super().on_exception(exception)

    def teardown(self) -> None:
        """Stop the agents of forked ranks; in other ranks they serve the next fit, too."""
        if isinstance(self._launcher, ForkLauncher):
            _stop()
        super().teardown()
        _receiver.clear()


def _process_groups_store(*_args: Any, **_options: Any) -> Iterator[tuple[dist.Store, int, int]]:
    """Yield a rendezvous at the store that the ranks share: another address might be taken, or lead to dead ranks."""
    yield dist.PrefixStore("rpc", default_store()), dist.get_rank(), dist.get_world_size()


def _stop(graceful: bool = True) -> None:
    """Shut this rank's agent down, if it runs, with the others or at once; the process can't start another one."""
    if rpc.is_available() and rpc._is_current_rpc_agent_set():
        rpc.shutdown(graceful, timeout=SHUTDOWN_TIMEOUT if graceful else 0)


def _stop_at_exit() -> None:
    with suppress(RuntimeError):  # other agents may have gone
        _stop()


# Calls

_receiver: list[Any] = []  # this process's, if any: a remote call reaches a process, not an object


def receiver() -> Any:
    """Return the object in this process that remote calls are for."""
    return _receiver[0]


def wait(future: Any, rank: int) -> Any:
    """Return the result of a call to a rank, while signal handlers run; RuntimeError if it has gone or is too late."""
    done = threading.Event()
    future.add_done_callback(lambda _: done.set())
    done.wait()
    with peer_errors(f"rank {rank}"):
        return future.wait()


@contextmanager
def peer_errors(peer: str) -> Iterator[None]:
    """Reword RPC's errors inside such that `failures` recognises a peer that is late or has gone."""
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if "ran for more than set timeout" in text:
            raise RuntimeError(f"Timed out: no answer from {peer}") from error
        if "tensorpipe" in text:
            raise RuntimeError(f"Connection closed by {peer}") from error
        raise


class CallQueue:
    """Calls that arrive in RPC threads and wait for the main thread, with futures of results; time-out in seconds."""

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self._calls: queue.SimpleQueue[tuple[Any, Future]] = queue.SimpleQueue()

    def put(self, call: Any) -> Future:
        """Add a call, in an RPC thread."""
        result: Future = Future()
        self._calls.put((call, result))
        return result

    def get(self, callers: Iterable[int]) -> tuple[Any, Future]:
        """Wait for the next call; RuntimeError if a rank that should call has gone, or is too late."""
        deadline, pings = time.monotonic() + self.timeout, dict[int, Future]()
        while True:
            with suppress(queue.Empty):
                return self._calls.get(timeout=PING_INTERVAL)
            for rank in callers:
                if time.monotonic() > deadline:
                    raise RuntimeError(f"Timed out: nothing from rank {rank}")
                if rank in pings and pings[rank].done():
                    wait(pings.pop(rank), rank)
                if rank not in pings:
                    pings[rank] = rpc.rpc_async(rank, torch.is_grad_enabled)


class Worker(CallQueue):
    """Executes the master's calls in its main thread; without an optimizer nothing is trained.

    Autocast, keyed noise and gradient mode belong to the thread in which Lightning calls a hook.
    """

    def __init__(self, timeout: float, optimizer: Optimizer | None) -> None:
        super().__init__(timeout)
        self.optimizer = optimizer

    def forward(self, *inputs: Tensor) -> tuple[Any, str]:
        """Return the module's output for some rows, on the CPU, and ""; or None and the error."""
        try:
            output = self.put(("forward", inputs)).wait()
        except Exception as error:  # noqa: BLE001 - it is raised on both sides, here by the main thread
            return None, f"{type(error).__name__}: {error}"
        # An empty view is copied, as its offset would abort the receiver.
        return tree_map_only(Tensor, lambda x: (x if x.numel() else x.clone()).cpu(), output), ""

    def parameters(self) -> list[Any]:
        """Return remote references to the trained parameters."""
        return [rpc.RRef(p) for p in (parameters_of(self.optimizer) if self.optimizer else [])]

    @staticmethod
    def call(worker: Any, method: Callable[..., Any], *args: Any) -> Any:
        """Return a future of a method's result, called on a remote reference's owner.

        `worker.rpc_async()` would first ask for the worker's type, and make the first call outside the thread whose
        distributed autograd context records it: its gradients are silently lost (torch 2.15).
        """
        return rpc.rpc_async(worker.owner(), _call_local, args=(worker, method, *args))

    def serve(self, name: str, function: Callable[..., Any]) -> None:
        """Execute the next call, which has to have this name; called in the main thread."""
        (called, args), result = self.get([0])
        assert called == name, f"asked to {called}, where all others {name}"
        try:
            result.set_result(function(*args))
        except Exception as error:
            result.set_exception(error)
            raise


class LocalOptimizer:
    """Steps the worker's optimizer for DistributedOptimizer, with its groups and learning rates."""

    def __init__(self, parameters: Sequence[Tensor]) -> None: ...

    def step(self) -> None:
        """Step in the main thread."""
        receiver().put(("step", ())).wait()


def _call_local(worker: Any, method: Callable[..., Any], *args: Any) -> Any:
    return method(worker.local_value(), *args)


@cache
def load_distributed_optimizer() -> Any:
    """Import torch's class, late, as that is slow, and without hints and warnings about torch's parts."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch.distributed.optim import DistributedOptimizer
    # Without the hint that LocalOptimizer has no functional form.
    logging.getLogger(DistributedOptimizer.__module__).addFilter(lambda record: record.args != (LocalOptimizer,))
    return DistributedOptimizer
