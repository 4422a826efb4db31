"""A process-group backend in Python: every collective is made of messages from one rank to another.

    from strategies import ring

    ring.register()
    torch.distributed.init_process_group("ring")

All of torch.distributed works on it as on gloo, for tensors in a CPU's memory: it is there to be read. `links` sends
and receives, `algorithms` are the collectives, `queue` runs them one after the other beside the caller, and `group` is
what torch calls.
"""

from strategies.ring.group import NAME, UNCHUNKED, RingGroup, UnchunkedGroup, register
from strategies.ring.links import Links

__all__ = ["NAME", "UNCHUNKED", "Links", "RingGroup", "UnchunkedGroup", "register"]
