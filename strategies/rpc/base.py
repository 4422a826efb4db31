"""What strategies share whose ranks call one another."""

from lightning.pytorch import LightningModule
from torch import nn
from torch.optim import LBFGS, Optimizer

from strategies.base.data_parallel import DataParallel
from strategies.base.launchers import ForkLauncher
from strategies.rpc import agents


class RPCStrategy(DataParallel):
    """Ranks that call one another by torch.distributed.rpc, from `_start_agents` on until they end."""

    rpc_name: str

    def _check_devices(self) -> None:
        super()._check_devices()
        agents.check(self.rpc_name)

    def check_module(self, module: LightningModule) -> None:
        """Raise ValueError where the module can't be trained so."""
        scaler = getattr(self.precision_plugin, "scaler", None)
        if not module.automatic_optimization:
            raise ValueError(f"strategy {self.rpc_name}: expected automatic optimization of {type(module).__name__}")
        if scaler is not None and scaler.is_enabled():
            kind = self.rpc_name
            raise ValueError(f"precision 16-mixed: expected one without a loss scale, as bf16-mixed, for {kind}")

    def _check_optimizers(self) -> None:
        """Raise ValueError where one of them would call for gradients again and again."""
        if any(isinstance(optimizer, LBFGS) for optimizer in self.optimizers):
            raise ValueError(f"strategy {self.rpc_name}: expected an optimizer other than LBFGS, which needs the loss")

    @property
    def _seconds(self) -> float:
        """How long a rank may keep the others waiting."""
        assert self._timeout is not None
        return self._timeout.total_seconds()

    def _start_agents(self) -> None:
        """Begin to take calls; what they need has to be there."""
        agents.start(self.global_rank, self.num_processes * self.num_nodes, self._seconds)
        self.barrier()  # an agent that has been running since an earlier fit is no sign that its rank is ready

    def on_train_end(self) -> None:
        """Wait until all have their last answers: a rank that ends sends none."""
        self.barrier()

    def on_exception(self, exception: BaseException) -> None:
        """Hang up: others may wait for an answer."""
        agents.stop(graceful=False)
        super().on_exception(exception)

    def teardown(self) -> None:
        """Hang up when all are done, in ranks that live for one fit; in others the agent serves the next one, too."""
        if isinstance(self._launcher, ForkLauncher):
            agents.stop()
        super().teardown()


def trained(optimizer: Optimizer) -> list[nn.Parameter]:
    """All that it steps."""
    return [p for group in optimizer.param_groups for p in group["params"]]
