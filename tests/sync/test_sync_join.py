"""Where a rank without batches adds its zeros: on the device whose sums the other ranks are in."""

import torch
import torch.distributed as dist
from ranks import ranks
from torch._subclasses.fake_tensor import FakeTensorMode

from leannorm import distributed, nn
from leannorm.distributed.group import StatisticsGroup


def zeros_in_join(rank):
    """The kinds of devices, by what the group serves and where the layer is; nothing is added to them."""
    seen = []
    StatisticsGroup.shadow = lambda self, device: seen.append(device.type)
    StatisticsGroup.follow_longest = lambda self, buffers: None
    both, host = (dist.new_group([0, 1], backend=kind) for kind in ("cpu:gloo,cuda:gloo", "gloo"))
    for group, device, affine in ((both, "cuda", True), (both, "cpu", True), (both, "cuda", False)):
        with FakeTensorMode():
            layer = nn.SyncBatchNorm(3, affine=affine, process_group=group, device=device)
        with distributed.join(torch.nn.Sequential(layer)):
            pass
    with distributed.join(nn.SyncBatchNorm(3, process_group=host, device="meta")):
        pass  # a device that the group does not serve
    dist.barrier()
    return seen


def test_zeros_are_added_on_the_layers_device_where_the_group_has_two_backends():
    assert ranks(2, zeros_in_join) == [["cuda", "cpu", "cuda", "cpu"]] * 2
