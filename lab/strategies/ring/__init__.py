"""A process-group backend in Python: every collective consists of messages between two ranks.

    from lab.strategies import ring

    ring.register()
    torch.distributed.init_process_group("ring")

All of torch.distributed works on it as on gloo, for tensors in a CPU's memory. It is made to be read: `algorithms`
are the collectives, `queue` runs them in order beside the caller, and torch calls `group`.
"""

from lab.strategies.ring.algorithms import Links
from lab.strategies.ring.group import NAME, UNCHUNKED, RingGroup, UnchunkedGroup, register
