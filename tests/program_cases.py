"""Small networks that a program must run as the eager model does, one for each thing that can differ."""

import torch
import torch.nn.functional as TF

from leannorm import nn

tnn = torch.nn


def stack(*layers, rest=True):
    tail = (tnn.ReLU(), tnn.Flatten(), tnn.LazyLinear(5)) if rest else ()
    net = tnn.Sequential(tnn.Conv2d(3, 4, 3), *layers, *tail)
    net(torch.randn(2, 3, 8, 8))
    for m in net.modules():
        if isinstance(m, tnn.modules.batchnorm._NormBase):
            m.reset_running_stats()
    return net


class Shared(tnn.Module):
    """One batch norm called twice, one convolution called twice, one weight under two names."""

    def __init__(self):
        super().__init__()
        self.conv = tnn.Conv2d(3, 3, 3, padding=1)
        self.bn = tnn.BatchNorm2d(3)
        self.again = self.bn
        self.head, self.tail = tnn.Linear(3, 3), tnn.Linear(3, 3)
        self.tail.weight = self.head.weight

    def forward(self, x):
        x = self.bn(self.conv(x)).relu()
        x = self.again(self.conv(x)).mean((2, 3))
        return self.tail(self.head(x))


class Repeated(tnn.Module):
    """Two modules, each called twice."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn = tnn.Conv2d(3, 3, 1), tnn.BatchNorm2d(3)

    def forward(self, x):
        return self.bn(self.conv(self.bn(self.conv(x))))


class InPlace(tnn.Module):
    """Evaluation-mode dropout hands back its input, which is then overwritten."""

    def __init__(self):
        super().__init__()
        self.conv, self.drop = tnn.Conv2d(3, 4, 3), tnn.Dropout(0.3)
        self.act, self.bn = tnn.ReLU(inplace=True), tnn.BatchNorm2d(4)

    def forward(self, x):
        y = self.conv(x)
        z = self.act(self.drop(y))
        return self.bn(z), z.view(-1), y


class Structured(tnn.Module):
    """Keyword inputs, nested results, constants, a plain attribute, a buffer that is not saved, no_grad."""

    def __init__(self):
        super().__init__()
        self.lin, self.bn, self.scale = tnn.Linear(8, 8), tnn.BatchNorm1d(3), torch.tensor([1.0, 2.0, 4.0])
        self.register_buffer("mask", torch.ones(8), persistent=False)

    def forward(self, x):
        x = x[:, :, 0]
        with torch.no_grad():
            frozen = self.lin(x) * self.mask
        y = self.bn(self.lin(x)) + frozen
        return {"y": [y, (y * 2, None)], "c": torch.tensor([3.0, 1.0]), "n": y.sum() * self.scale}


class ByMode(tnn.Module):
    """Different results in each mode, and a state that both change."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn, self.aux = tnn.Conv2d(3, 4, 3), tnn.BatchNorm2d(4), tnn.Linear(4, 2)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls.add_(1)
        y = self.bn(self.conv(x)).mean((2, 3))
        return (y * self.calls, self.aux(y)) if self.training else y


class Noisy(tnn.Module):
    """Random in both modes: the generator is used alike."""

    def __init__(self):
        super().__init__()
        self.bn = tnn.BatchNorm2d(3)

    def forward(self, x):
        x = TF.dropout(x, 0.5, training=True)
        return TF.dropout(self.bn(x + torch.rand_like(x)), 0.5, training=True)


NETWORKS = {
    "batch norm": lambda: stack(tnn.BatchNorm2d(4)),
    "batch norm without affine": lambda: stack(tnn.BatchNorm2d(4, affine=False)),
    "batch norm without statistics": lambda: stack(tnn.BatchNorm2d(4, track_running_stats=False)),
    "dropout": lambda: stack(tnn.Dropout(0.4), tnn.Dropout2d(0.2), tnn.AlphaDropout(0.1)),
    "sync batch norm": lambda: stack(tnn.SyncBatchNorm(4)),
    "instance norm": lambda: stack(tnn.InstanceNorm2d(4, affine=True, track_running_stats=True)),
    "leannorm": lambda: stack(nn.BatchNorm2d(4)),
    "cumulative": lambda: stack(torch.nn.BatchNorm2d(4, momentum=None), torch.nn.Dropout(0.2)),
    "leannorm cumulative": lambda: stack(nn.BatchNorm2d(4, momentum=None), nn.BatchNorm2d(4, affine=False)),
    "leannorm convolution": lambda: stack(nn.ConvBatchNorm2d(4, 6, 3, padding="same"), nn.LayerNorm(6)),
    "leannorm rows and groups": lambda: tnn.Sequential(
        nn.GroupNorm(1, 3), nn.InstanceNorm2d(3, affine=True, track_running_stats=True), nn.RMSNorm(8)
    ),
    "operator": lambda: stack(nn.BatchNormOp(4), nn.BatchNormOp(4, use_global_est=True)),
    "shared modules": Shared,
    "repeated modules": Repeated,
    "in place": InPlace,
    "structure": Structured,
    "by mode": ByMode,
    "random": Noisy,
    "attention": lambda: tnn.Sequential(
        tnn.Flatten(2), tnn.TransformerEncoderLayer(64, 2, 16, 0.2, batch_first=True)
    ),
    "recurrent": lambda: tnn.Sequential(tnn.Flatten(2), tnn.GRU(64, 8, 2, dropout=0.3, batch_first=True)),
}


def small():
    """For the command line."""
    return stack(tnn.BatchNorm2d(4))
