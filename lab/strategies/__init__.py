"""Strategies to learn from: over RPC, around a ring, by hand, with fewer or smaller messages."""

from lab.strategies.allreduce import AllReduce
from lab.strategies.compressed import DDPFP16, DDPPowerSGD
from lab.strategies.ddp_ring import DDPRing
from lab.strategies.local_sgd import LocalSGD
from lab.strategies.param_server import ParamServer
