"""Accuracy of running statistics: `recalibrate` compared with what other libraries do, on real digits.

    python -m benchmarks.recalibrate

The layer is one batch norm on the pixels of scikit-learn's 1,797 digits whose variance is above 0.5. The
batches are 100 digits sorted by class; 100 shuffled digits; four batches of which the last has 3 digits; and
pixels of standard deviation 1 and mean about 1,000. For each library it prints the largest error of a mean,
in standard deviations, and of a variance, as a factor minus 1, over all channels. The reference is one pass
over all data in float64. fvcore's precise BN runs if it is installed. timm's `distribute_bn` runs on 4 gloo
ranks, each of which has exact statistics of its share.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import start_processes
from torch.optim.swa_utils import update_bn

import leannorm
from benchmarks.architectures import import_torchvision

Way = Callable[[nn.BatchNorm1d, list[Tensor]], None]
RANKS = 4


def digits() -> tuple[Tensor, Tensor]:
    """Pixels (1797, C), float32, sorted by class; and the same rows shuffled."""
    from sklearn.datasets import load_digits

    bundled = load_digits()
    order = torch.from_numpy(bundled.target).argsort(stable=True)
    pixels = torch.from_numpy(bundled.data)[order]
    pixels = pixels[:, pixels.var(0) > 0.5].float()
    return pixels, pixels[torch.randperm(len(pixels), generator=torch.Generator().manual_seed(0))]


def by_torch(layer: nn.BatchNorm1d, batches: list[Tensor]) -> None:
    update_bn(batches, layer)


def by_fvcore(layer: nn.BatchNorm1d, batches: list[Tensor]) -> None:
    from fvcore.nn import update_bn_stats  # type: ignore[import-not-found]

    update_bn_stats(layer, batches, len(batches))


def by_timm(layer: nn.BatchNorm1d, batches: list[Tensor]) -> None:
    """Each rank has exact statistics of a quarter of the rows, and timm averages them."""
    shares = torch.cat(batches).tensor_split(RANKS)
    layer.share_memory()
    with TemporaryDirectory() as folder:
        start_processes(_on_rank, (f"{folder}/store", layer, shares), RANKS)


def _on_rank(rank: int, store: str, layer: nn.BatchNorm1d, shares: tuple[Tensor, ...]) -> None:
    import_torchvision()
    from timm.utils.distributed import distribute_bn

    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=RANKS)
    groups = [dist.new_group([of]) for of in range(RANKS)]
    own = copy.deepcopy(layer)
    leannorm.recalibrate(own, [shares[rank]], process_group=groups[rank])
    distribute_bn(own, RANKS, reduce=True)
    if rank == 0:
        layer.load_state_dict(own.state_dict())
    dist.destroy_process_group()


def by_leannorm(layer: nn.BatchNorm1d, batches: list[Tensor]) -> None:
    leannorm.recalibrate(layer, batches)


WAYS: dict[str, Way] = {
    "swa_utils.update_bn": by_torch,
    "fvcore's update_bn_stats": by_fvcore,
    "timm's distribute_bn": by_timm,
    "leannorm.recalibrate": by_leannorm,
}


def errors(way: Way, batches: list[Tensor]) -> tuple[float, float]:
    """The errors of the mean, in standard deviations, and of the variance, as a factor minus 1."""
    rows = torch.cat(batches).double()
    layer = nn.BatchNorm1d(rows.shape[1])
    way(layer, batches)
    assert layer.running_mean is not None
    assert layer.running_var is not None
    ratio = layer.running_var.double() / rows.var(0)
    off = (layer.running_mean.double() - rows.mean(0)) / rows.std(0)
    return float(off.abs().max()), float(torch.maximum(ratio, 1 / ratio.abs()).max() - 1)


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    by_class, shuffled = digits()
    cases = {
        "by class": list(by_class.split(100)),
        "shuffled": list(shuffled.split(100)),
        "a last batch of 3": [*shuffled[:300].split(100), shuffled[300:303]],
        "mean 1,000 std": list((shuffled / shuffled.std(0) + 1000).split(100)),
    }
    print(
        f"{len(by_class)} rows, {by_class.shape[1]} channels; error of mean (std), of variance (factor - 1)"
    )
    print(f"{'':26}" + "".join(f"{name:>20}" for name in cases))
    for name, way in WAYS.items():
        found = []
        for batches in cases.values():
            try:
                found.append("{:.1e}, {:.1e}".format(*errors(way, batches)))
            except ImportError:
                found.append("not installed")
        print(f"{name:26}" + "".join(f"{one:>20}" for one in found))


if __name__ == "__main__":
    main()
