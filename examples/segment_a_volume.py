"""Balls and boxes in noise, segmented with nnU-Net's network and deep supervision, under `lean("conv")`.

    python examples/segment_a_volume.py

`pip install --no-deps dynamic-network-architectures` brings the network; without it, the script builds the
same layers itself.
"""

from contextlib import nullcontext
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from measure import held, same_weights
from torch import nn

import leannorm

SIDE, BATCH, STEPS, FEATURES = 32, 2, 30, (8, 16, 32, 64)


def volumes(seed):
    """Volumes (N, 1, D, H, W), and a label for each voxel: 0 for nothing, 1 for a ball, 2 for a box."""
    random = torch.Generator().manual_seed(seed)
    places = torch.stack(torch.meshgrid(*[torch.arange(SIDE)] * 3, indexing="ij"))
    labels = torch.zeros(BATCH, SIDE, SIDE, SIDE, dtype=torch.long)
    for label in labels:
        ball, box = torch.randint(8, SIDE - 8, (2, 3, 1, 1, 1), generator=random)
        label[(places - ball).square().sum(0) < 49] = 1
        label[(places - box).abs().amax(0) < 5] = 2
    return labels[:, None] + 0.5 * torch.randn(labels[:, None].shape, generator=random), labels


def block(inputs, outputs, stride=1):
    norm = nn.InstanceNorm3d(outputs, affine=True)
    return nn.Sequential(nn.Conv3d(inputs, outputs, 3, stride, 1), norm, nn.LeakyReLU(inplace=True))


class UNet(nn.Module):
    """Like nnU-Net's PlainConvUNet: two convolutions per stage, an output at each size, the finest first."""

    def __init__(self):
        super().__init__()
        pairs = list(zip((1, *FEATURES), FEATURES, strict=False))
        self.down = nn.ModuleList(
            nn.Sequential(block(fine, coarse, 1 if fine == 1 else 2), block(coarse, coarse))
            for fine, coarse in pairs
        )
        ups = pairs[:0:-1]
        self.up = nn.ModuleList(nn.ConvTranspose3d(coarse, fine, 2, 2) for fine, coarse in ups)
        self.join = nn.ModuleList(nn.Sequential(block(2 * fine, fine), block(fine, fine)) for fine, _ in ups)
        self.last = nn.ModuleList(nn.Conv3d(fine, 3, 1) for fine, _ in ups)

    def forward(self, x):
        skips, outputs = [], []
        for stage in self.down:
            skips.append(x := stage(x))
        for up, join, last, skip in zip(self.up, self.join, self.last, skips[-2::-1], strict=True):
            outputs.append(last(x := join(torch.cat((up(x), skip), 1))))
        return outputs[::-1]


def network():
    torch.manual_seed(0)
    if find_spec("dynamic_network_architectures") is None:
        return UNet()
    from dynamic_network_architectures.architectures.unet import PlainConvUNet

    sizes = {"n_stages": 4, "features_per_stage": FEATURES, "kernel_sizes": 3, "strides": [1, 2, 2, 2]}
    layers = {"conv_op": nn.Conv3d, "conv_bias": True, "norm_op": nn.InstanceNorm3d, "nonlin": nn.LeakyReLU}
    layers |= {"norm_op_kwargs": {"affine": True}, "nonlin_kwargs": {"inplace": True}}
    stages = {
        "n_conv_per_stage": 2,
        "n_conv_per_stage_decoder": 2,
        "num_classes": 3,
        "deep_supervision": True,
    }
    return PlainConvUNet(1, **sizes, **layers, **stages)


def loss_of(model, images, labels):
    """The cross-entropy of all outputs, each with half the weight of the next finer one."""
    loss = 0.0
    for i, logits in enumerate(model(images)):
        loss = loss + F.cross_entropy(logits, labels[:, :: 2**i, :: 2**i, :: 2**i]) / 2**i
    return loss


def train(name, around):
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(STEPS):
        images, labels = volumes(step)
        with around:
            loss = loss_of(model, images, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (step + 1) % 5 == 0:
            print(f"{name}: step {step + 1} of {STEPS}, loss {loss:.3f}", flush=True)
    images, labels = volumes(STEPS)
    with torch.no_grad():
        found = model(images)[0].argmax(1)
    shapes = labels > 0
    print(f"voxels of balls and boxes found: {(found == labels)[shapes].float().mean():.2f}")
    return model


def main():
    stock, model = train("plain PyTorch", nullcontext()), train('lean("conv")', leannorm.lean("conv"))
    same_weights(stock, model)
    images, labels = volumes(0)
    for recompute in ("norm", "conv"):
        print(f"lean({recompute!r})", end=" ")
        held(model, lambda: loss_of(model, images, labels), recompute=recompute)


if __name__ == "__main__":
    main()
