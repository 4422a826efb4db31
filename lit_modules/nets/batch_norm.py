"""BatchNorm over the global batch, on any device (torch's SyncBatchNorm refuses the CPU)."""

from typing import Any

import torch
from torch import Tensor, nn

from apprentice import replicas
from apprentice.private import BatchNorm
from lit_modules.nets.layers import drop_stand_ins


class _Normalize(torch.autograd.Function):
    """(x - mean) / std over all ranks' rows; the gradient flows through both statistics."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mean: Tensor, invstd: Tensor, total: Tensor) -> Tensor:
        normal = (x - _per_channel(mean, x)) * _per_channel(invstd, x)
        ctx.save_for_backward(normal, invstd, total)
        ctx.is_counted = len(drop_stand_ins(x)) == len(x)
        ctx.total = replicas.bound_all_reduce_sum()  # bound here: backward can run in a thread without this context
        return normal

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        normal, invstd, total = ctx.saved_tensors
        axes = [d for d in range(grad.dim()) if d != 1]
        sums = torch.stack([grad.sum(axes), (grad * normal).sum(axes)])
        sums = ctx.total(sums) / total
        if not ctx.is_counted:  # the statistics do not depend on these rows
            return _per_channel(invstd, grad) * grad, None, None, None
        return (
            _per_channel(invstd, grad) * (grad - _per_channel(sums[0], grad) - normal * _per_channel(sums[1], grad)),
            None,
            None,
            None,
        )


def _per_channel(per_channel: Tensor, x: Tensor) -> Tensor:
    return per_channel.view(1, -1, *[1] * (x.dim() - 2))


def _statistics(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean and biased variance (C,) over all ranks, and the count of values in a channel.

    Numerically stable, as each rank is centred first.
    """
    axes = [d for d in range(x.dim()) if d != 1]
    count = x.numel() / max(x.shape[1], 1)
    mean = x.sum(axes) / max(count, 1)
    spread = (x - _per_channel(mean, x)).square().sum(axes)
    parts = replicas.all_gather(torch.cat([mean, spread, mean.new_tensor([count])]).double())  # (replicas, 2 C + 1)
    means, spreads = parts[:, :-1].chunk(2, 1)
    counts = parts[:, -1:]
    total = counts.sum()
    global_mean = (means * counts).sum(0) / total
    variance = (spreads + counts * (means - global_mean).square()).sum(0) / total
    return global_mean.to(x.dtype), variance.to(x.dtype), total.to(x.dtype)


class _Global(BatchNorm):
    """BatchNorm by the global batch's statistics in training with several replicas; otherwise torch's BatchNorm.

    A single value of a channel in a global batch has no variance: it is normalised by the running statistics, which
    stay as they are; ValueError if no earlier batch gave any. `gathers` tells that all replicas compute it, also those
    without rows.
    """

    gathers = True

    def forward(self, x: Tensor) -> Tensor:
        rows = drop_stand_ins(x)
        if not self.training or (replicas.count() == 1 and rows.numel() > x.shape[1]):
            return super().forward(x)
        if x.dtype in {torch.float16, torch.bfloat16}:  # sums and counts would overflow or round
            return self.forward(x.float()).to(x.dtype)
        with torch.no_grad():
            mean, variance, total = _statistics(rows)
        if rows.numel() <= x.shape[1] and total <= 1:  # other ranks need not wait for the GPU to know
            normal = self._by_running_statistics(x, bool(total))
        else:
            self._track(mean, variance * total / (total - 1))
            normal = _Normalize.apply(x, mean, (variance + self.eps).rsqrt(), total)
        return normal if self.weight is None else normal * _per_channel(self.weight, x) + _per_channel(self.bias, x)

    def _by_running_statistics(self, x: Tensor, has_value: bool) -> Tensor:
        mean, variance = self.running_mean, self.running_var
        if has_no_running_statistics(self) and not has_value:  # stand-ins alone, which count nowhere
            mean, variance = x.new_zeros(x.shape[1]), x.new_ones(x.shape[1])
        if mean is None or variance is None or (has_value and not self.num_batches_tracked):
            expected = "expected more than one value a channel, or running statistics of batches before"
            raise ValueError(f"BatchNorm: {expected}; got an input of shape {tuple(x.shape)}")
        return (x - _per_channel(mean, x)) * _per_channel((variance + self.eps).rsqrt(), x)

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        momentum = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
        self.running_var.lerp_(variance.to(self.running_var.dtype), momentum)


class _Global1d(_Global, nn.BatchNorm1d): ...


class _Global2d(_Global, nn.BatchNorm2d): ...


class _Global3d(_Global, nn.BatchNorm3d): ...


GLOBAL: dict[type[nn.Module], type[_Global]] = {
    nn.BatchNorm1d: _Global1d, nn.BatchNorm2d: _Global2d, nn.BatchNorm3d: _Global3d,
}  # fmt: skip


def has_no_running_statistics(module: nn.Module) -> bool:
    """Return whether a module is a BatchNorm that uses the batch's statistics in eval mode, too."""
    batch_norm = isinstance(module, BatchNorm)
    return batch_norm and module.running_mean is None and module.running_var is None


def globalise(net: nn.Module) -> nn.Module:
    """Let every BatchNorm inside `net` use the global batch; parameters, buffers and their names stay the same.

    Other people's subclasses of BatchNorm stay as they are, but for timm's with an activation;
    `find_local_batch_norms` finds them.
    """
    for module in net.modules():
        if _is_timms(module):
            module.register_forward_hook(_activate)
            module.__class__ = _Global2d
        elif (kind := type(module)) in GLOBAL:
            module.__class__ = GLOBAL[kind]  # in place, for weights that are shared with other modules
    return net


def find_local_batch_norms(net: nn.Module) -> list[str]:
    """Return the names of the BatchNorm layers in training mode that see no rows of other ranks."""
    over_ranks = (_Global, nn.SyncBatchNorm)
    layers = [(name, m) for name, m in net.named_modules() if isinstance(m, BatchNorm)]
    return [name for name, layer in layers if layer.training and not isinstance(layer, over_ranks)]


def _is_timms(module: nn.Module) -> bool:
    return type(module).__name__ == "BatchNormAct2d"  # known by its name: importing timm is slow


def _activate(norm: Any, _inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    activated: Tensor = norm.act(norm.drop(output))
    return activated
