# %% [markdown]
# # Memory over a training step, before and after `lean()`
#
# A small residual network learns from two photographs. The plots show the bytes that are allocated at every
# moment of a training step, in plain PyTorch and with the forward pass in `leannorm.lean`. Parameters and the
# batch are not counted.
#
# This notebook is made from `memory_over_a_step.py` by `python examples/make_notebook.py`. It needs
# scikit-learn, pillow and matplotlib.

# %%
import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from sklearn.datasets import load_sample_images
from torch import nn

import leannorm
from leannorm.report.memory import measure_step

# %% [markdown]
# ## Data: pieces of two photographs
# The network learns which photograph a piece was cut from.

# %%
photographs = [
    torch.tensor(image).float().permute(2, 0, 1) / 128 - 1 for image in load_sample_images().images
]
corners = [(64 * i, 64 * j) for i in range(4) for j in range(4)]
images = torch.stack([photo[:, y : y + 64, x : x + 64] for photo in photographs for y, x in corners])
labels = torch.arange(2).repeat_interleave(16)
print(f"{len(images)} pieces of {tuple(images.shape[1:])}")


# %% [markdown]
# ## Model: residual blocks of PyTorch's own layers


# %%
def conv_norm(channels_in, channels, stride=1):
    conv = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(channels))


class Block(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.first, self.second = conv_norm(channels, channels), conv_norm(channels, channels)

    def forward(self, x):
        y = F.relu(self.first(x), inplace=True)
        return F.relu(self.second(y) + x, inplace=True)


torch.manual_seed(0)
model = nn.Sequential(
    conv_norm(3, 32, stride=2),
    nn.ReLU(inplace=True),
    *(Block(32) for _ in range(4)),
    conv_norm(32, 64, stride=2),
    nn.ReLU(inplace=True),
    *(Block(64) for _ in range(2)),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(64, 2),
)


# %% [markdown]
# ## Measure: the same step, three times
# `lean("norm")` rebuilds the outputs of norms and activations in the backward pass. `lean("conv")` also
# rebuilds those of cheap convolutions. The gradients equal the baseline's, bit for bit.


# %%
def step(recompute=None):
    """The memory of a step, and its gradients."""
    model.zero_grad(set_to_none=True)

    def forward():
        if recompute is None:
            return F.cross_entropy(model(images), labels)
        with leannorm.lean(recompute):
            return F.cross_entropy(model(images), labels)

    memory = measure_step(forward)
    return memory, [p.grad for p in model.parameters()]


steps = {"baseline": step(), 'lean("norm")': step("norm"), 'lean("conv")': step("conv")}
baseline, gradients = steps["baseline"]
for name, (memory, found) in steps.items():
    same = all(torch.equal(a, b) for a, b in zip(gradients, found, strict=True))
    print(
        f"{name:12} kept {memory.held / 1e6:6.1f} MB ({memory.held / baseline.held:.2f} of the baseline's), "
        f"peak {memory.peak / 1e6:6.1f} MB ({memory.peak / baseline.peak:.2f}), "
        f"gradients {'equal bit for bit' if same else 'different'}"
    )

# %% [markdown]
# ## Memory over the step
# The forward pass is left of the line, and the backward pass right of it. The horizontal axis counts
# allocations and frees instead of seconds, since recording them takes time.

# %%
figure, axes = plt.subplots(1, 3, figsize=(12, 3.4), sharey=True, layout="constrained")
for axis, (name, (memory, _)) in zip(axes, steps.items(), strict=True):
    alive = [nbytes / 1e6 for _, nbytes in memory.timeline]
    end = sum(seconds <= memory.forward_end for seconds, _ in memory.timeline)
    axis.fill_between(range(len(alive)), alive, step="post", alpha=0.5)
    axis.axvline(end, color="black", linewidth=1)
    axis.set(
        title=f"{name}: kept {memory.held / 1e6:.0f} MB, peak {memory.peak / 1e6:.0f} MB",
        xlabel="allocations and frees",
    )
axes[0].set_ylabel("MB allocated")
plt.show()
