"""Models whose batch norms are folded, or not: what stands before and behind a norm, case by case."""

import torch

import leannorm

tnn = torch.nn


def trained(net, *inputs):
    """Statistics, scales and shifts that are nobody's defaults."""
    generator = torch.Generator().manual_seed(1)
    for m in net.modules():
        for name in ("running_mean", "running_var", "estimated_mean", "estimated_var"):
            buffer = getattr(m, name, None)
            if buffer is not None:
                value = torch.rand(buffer.shape, generator=generator)
                buffer.copy_(value + 0.5 if "var" in name else value - 0.3)
        if isinstance(m, tnn.modules.batchnorm._BatchNorm) and m.affine:
            m.weight.data.uniform_(0.5, 1.5, generator=generator)
            m.bias.data.uniform_(-0.5, 0.5, generator=generator)
    return net


class Twice(tnn.Module):
    """One convolution, called before two norms or before one norm and alone."""

    def __init__(self, same):
        super().__init__()
        self.conv = tnn.Conv2d(3, 3, 3, padding=1)
        self.a, self.b = tnn.BatchNorm2d(3), tnn.BatchNorm2d(3)
        self.same = same

    def forward(self, x):
        x = self.a(self.conv(x)).relu()
        y = self.conv(x)
        return self.a(y) if self.same else y


class Declared(tnn.Module):
    """Declared in one order, run in another; a functional call stands between two of them."""

    def __init__(self):
        super().__init__()
        self.a, self.bn_b, self.b, self.bn_a = (
            tnn.Conv2d(3, 4, 3),
            tnn.BatchNorm2d(4),
            tnn.Conv2d(4, 4, 3),
            tnn.BatchNorm2d(4),
        )
        self.c, self.bn_c = tnn.Conv2d(4, 4, 1), tnn.BatchNorm2d(4)

    def forward(self, x):
        return self.bn_c(self.c(self.bn_b(self.b(self.bn_a(self.a(x))))).tanh())


class Residual(tnn.Module):
    """The convolution's result is used beside the norm."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn = tnn.Conv2d(3, 3, 1), tnn.BatchNorm2d(3)

    def forward(self, x):
        y = self.conv(x)
        return y + self.bn(y)


class Shortcut(tnn.Module):
    """What is added and activated behind a norm: one call of leannorm's after `convert`."""

    def __init__(self):
        super().__init__()
        self.conv1, self.bn1, self.relu = tnn.Conv2d(3, 3, 3, padding=1), tnn.BatchNorm2d(3), tnn.ReLU()
        self.conv2, self.bn2 = tnn.Conv2d(3, 3, 3, padding=1), tnn.BatchNorm2d(3)

    def forward(self, x):
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        y += x
        return self.relu(y)


def seq(*layers):
    return tnn.Sequential(*layers)


IMAGE, ROW = (2, 3, 9, 9), (4, 6)
# name: (model, input shape, norms folded, words of the reasons for those that are not)
CASES = {
    "conv": (lambda: seq(tnn.Conv2d(3, 4, 3), tnn.BatchNorm2d(4)), IMAGE, 1, ()),
    "conv, groups, no bias": (
        lambda: seq(tnn.Conv2d(3, 6, 3, groups=3, bias=False), tnn.BatchNorm2d(6)),
        IMAGE,
        1,
        (),
    ),
    "conv 1d, 3d": (lambda: seq(tnn.Conv1d(3, 4, 3), tnn.BatchNorm1d(4)), (2, 3, 9), 1, ()),
    "conv 3d": (lambda: seq(tnn.Conv3d(3, 4, 2), tnn.BatchNorm3d(4)), (2, 3, 4, 4, 4), 1, ()),
    "padded with reflections": (
        lambda: seq(tnn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"), tnn.BatchNorm2d(4)),
        IMAGE,
        1,
        (),
    ),
    "same padding": (lambda: seq(tnn.Conv2d(3, 4, 3, padding="same"), tnn.BatchNorm2d(4)), IMAGE, 1, ()),
    "transposed": (lambda: seq(tnn.ConvTranspose2d(3, 4, 3, stride=2), tnn.BatchNorm2d(4)), IMAGE, 1, ()),
    "transposed, groups": (
        lambda: seq(tnn.ConvTranspose2d(6, 4, 3, groups=2, bias=False), tnn.BatchNorm2d(4)),
        (2, 6, 5, 5),
        1,
        (),
    ),
    "transposed 1d, groups": (
        lambda: seq(tnn.ConvTranspose1d(4, 8, 3, groups=4), tnn.BatchNorm1d(8)),
        (2, 4, 5),
        1,
        (),
    ),
    "linear": (lambda: seq(tnn.Linear(6, 5), tnn.BatchNorm1d(5)), ROW, 1, ()),
    "linear, no affine": (
        lambda: seq(tnn.Linear(6, 5, bias=False), tnn.BatchNorm1d(5, affine=False)),
        ROW,
        1,
        (),
    ),
    "linear on 3-D": (lambda: seq(tnn.Linear(6, 6), tnn.BatchNorm1d(6)), (4, 6, 6), 0, ("another axis",)),
    "linear after, 3-D": (lambda: seq(tnn.BatchNorm1d(6), tnn.Linear(6, 6)), (4, 6, 6), 0, ("another axis",)),
    "without statistics": (
        lambda: seq(tnn.Conv2d(3, 4, 3), tnn.BatchNorm2d(4, track_running_stats=False)),
        IMAGE,
        0,
        ("batch's own",),
    ),
    "norm, then conv": (lambda: seq(tnn.BatchNorm2d(3), tnn.Conv2d(3, 4, 3)), IMAGE, 1, ()),
    "norm, then conv with groups": (
        lambda: seq(tnn.BatchNorm2d(4), tnn.Conv2d(4, 8, 3, groups=2, bias=False)),
        (2, 4, 7, 7),
        1,
        (),
    ),
    "norm, then padded conv": (
        lambda: seq(tnn.BatchNorm2d(3), tnn.Conv2d(3, 4, 3, padding=1)),
        IMAGE,
        0,
        ("border",),
    ),
    "norm, then linear": (lambda: seq(tnn.BatchNorm1d(6), tnn.Linear(6, 5)), ROW, 1, ()),
    "norm, then transposed": (
        lambda: seq(tnn.BatchNorm2d(3), tnn.ConvTranspose2d(3, 4, 3)),
        IMAGE,
        0,
        ("border",),
    ),
    "norms on both sides": (
        lambda: seq(tnn.BatchNorm2d(3), tnn.Conv2d(3, 4, 3), tnn.BatchNorm2d(4)),
        IMAGE,
        2,
        (),
    ),
    "activation between": (
        lambda: seq(tnn.Conv2d(3, 4, 3), tnn.ReLU(), tnn.BatchNorm2d(4), tnn.ReLU()),
        IMAGE,
        0,
        ("relu",),
    ),
    "conv twice, one norm": (lambda: Twice(True), IMAGE, 1, ()),
    "conv twice, once alone": (lambda: Twice(False), IMAGE, 0, ("also called without",)),
    "declared in another order": (Declared, (2, 3, 12, 12), 2, ("tanh",)),
    "one image without a batch": (
        lambda: seq(tnn.Conv2d(3, 5, 3), tnn.BatchNorm1d(7)),
        (3, 9, 9),
        0,
        ("another axis",),
    ),
    "used beside the norm": (Residual, IMAGE, 0, ("used elsewhere",)),
    "leannorm's layers": (
        lambda: seq(tnn.Conv2d(3, 4, 3), leannorm.nn.BatchNorm2d(4, momentum=None)),
        IMAGE,
        1,
        (),
    ),
    "leannorm's joined layer": (
        lambda: seq(leannorm.nn.ConvBatchNorm2d(3, 4, 3, padding=1), tnn.ReLU()),
        IMAGE,
        1,
        (),
    ),
    "fused, in a row": (
        lambda: seq(
            tnn.Conv2d(3, 4, 3), tnn.BatchNorm2d(4), tnn.SiLU(), tnn.Conv2d(4, 4, 1), tnn.BatchNorm2d(4)
        ),
        IMAGE,
        2,
        (),
    ),
    "fused, with a shortcut": (lambda: Shortcut(), IMAGE, 2, ()),
    "leannorm's norm and activation": (
        lambda: seq(tnn.Conv2d(3, 4, 3), leannorm.nn.BatchNormAct2d(4, act="leaky_relu")),
        IMAGE,
        1,
        (),
    ),
    "half precision": (lambda: seq(tnn.Conv2d(3, 4, 3), tnn.BatchNorm2d(4)).bfloat16(), IMAGE, 1, ()),
    "half weights, wide statistics": (
        lambda: seq(tnn.Conv2d(3, 4, 3).bfloat16(), leannorm.nn.BatchNorm2d(4)),
        IMAGE,
        1,
        (),
    ),
}
