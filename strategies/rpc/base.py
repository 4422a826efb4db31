"""The base of strategies whose ranks call one another by RPC."""

from lightning.pytorch import LightningModule
from lightning.pytorch.overrides.distributed import _sync_module_states
from torch.distributed import rpc
from torch.optim import LBFGS

from strategies.base.data_parallel import DataParallel
from strategies.base.launchers import ForkLauncher
from strategies.rpc import agents


class RPCStrategy(DataParallel):
    """Runs an RPC agent in each rank, from `_start_agents` until the ranks end."""

    rpc_name: str

    def _check_devices(self) -> None:
        super()._check_devices()
        if not rpc.is_available():
            expected = "expected a torch with torch.distributed.rpc, which this one was built without"
            raise ValueError(f"strategy {self.rpc_name}: {expected}")

    def check_module(self, module: LightningModule) -> None:
        """Raise ValueError where the strategy can't train the module."""
        if not module.automatic_optimization:
            raise ValueError(f"strategy {self.rpc_name}: expected automatic optimization of {type(module).__name__}")
        if self._scales_loss:
            expected = "expected one without a loss scale, as bf16-mixed"
            raise ValueError(f"precision 16-mixed: {expected}, for {self.rpc_name}")

    def _check_optimizers(self) -> None:
        """Raise ValueError where an optimizer calls its closure several times a step."""
        if any(isinstance(optimizer, LBFGS) for optimizer in self.optimizers):
            raise ValueError(f"strategy {self.rpc_name}: expected an optimizer other than LBFGS, which needs the loss")

    def configure_ddp(self) -> None:
        """Start with rank zero's states, without a wrapper."""
        _sync_module_states(self._module)

    def _start_agents(self) -> None:
        """Accept calls from now on; the objects that they need have to exist."""
        agents.start(self.global_rank, self._num_ranks, self._timeout_seconds)
        self.barrier()  # an agent that runs since an earlier fit does not mean that its rank is ready

    def on_train_end(self) -> None:
        """Wait until all ranks have their last results: a rank that ends sends none."""
        self.barrier()

    def on_exception(self, exception: BaseException) -> None:
        """Stop the agent at once: others may wait for a result."""
        agents.stop(graceful=False)
        super().on_exception(exception)

    def teardown(self) -> None:
        """Stop the agents of forked ranks; in other ranks they serve the next fit, too."""
        if isinstance(self._launcher, ForkLauncher):
            agents.stop()
        super().teardown()
