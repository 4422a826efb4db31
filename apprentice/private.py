"""Private names of torch that several layers use."""

from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_map_only, tree_unflatten

TORCH = ">=2.11,<2.16"  # the versions that have them
