"""Nets as they are trained on any number of devices."""

from lightning.pytorch.utilities import rank_zero_warn
from torch import nn

from apprentice.keyed import Dropout, find_unkeyed_layers
from apprentice.weights import FEW, list_keys
from lit_modules.nets.base import unwrap_logits
from lit_modules.nets.batch_norm import find_local_batch_norms, globalise, has_no_running_statistics


def prepare_net(net: nn.Module) -> nn.Module:
    """Return the net with BatchNorm over the global batch, and a number for each layer of keyed dropout.

    Warns of layers whose noise or statistics are a rank's own, and of BatchNorm without running statistics.
    """
    keyed_layers = [m for m in net.modules() if isinstance(m, Dropout)]
    if len({m.layer for m in keyed_layers}) < len(keyed_layers):
        for number, module in enumerate(keyed_layers):
            module.layer = number  # otherwise two layers of one width would draw one mask
    if names := find_unkeyed_layers(net):
        advice = "its numbers move with the devices and a resume, unless exact; apprentice.keyed.Dropout's do not"
        rank_zero_warn(f"{type(net).__name__} draws noise from torch's generator in {list_keys(names, FEW)}: {advice}")
    if names := [name for name, module in net.named_modules() if has_no_running_statistics(module)]:
        keeps = f"{type(net).__name__} keeps no running statistics in {names[0] or 'itself'}"
        rank_zero_warn(f"{keeps}: its scores for a sample depend on those that are evaluated with it")
    if names := find_local_batch_norms(globalise(net)):
        advice = "numbers move with the device count; those of torch's BatchNorm do not"
        rank_zero_warn(f"{type(net).__name__} has a BatchNorm of its own in {names[0]}: {advice}")
    return unwrap_logits(net)
