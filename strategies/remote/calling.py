"""What strategies share whose ranks call one another."""

from strategies.base import DataParallel
from strategies.launchers import ForkLauncher
from strategies.remote import agents


class Calling(DataParallel):
    """Ranks that call one another by torch.distributed.rpc, from `_start_agents` on until they end."""

    rpc_name: str

    def _check_devices(self) -> None:
        super()._check_devices()
        agents.check(self.rpc_name)

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
