# %% [markdown]
# # Which setting of `lean()`
#
# This notebook trains one network on one batch of handwritten digits with the settings of `leannorm.lean()`.
# For each setting it measures the bytes that the forward pass keeps for the backward pass, the peak of the
# step, and its time. The gradients equal plain PyTorch's, bit for bit.
#
# This notebook is made from `which_setting.py` by `python examples/make_notebook.py`. It needs scikit-learn
# and matplotlib.

# %%
from statistics import median
from time import perf_counter

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import leannorm
from leannorm.report.memory import measure_step

# %% [markdown]
# ## Data and model
# Digits as images of 32×32 pixels, and a residual network whose blocks are convolution, batch norm and SiLU.

# %%
digits = load_digits()
images = torch.from_numpy(digits.images[:64]).float().unsqueeze(1) / 8 - 1
images = F.interpolate(images, (32, 32), mode="bilinear")
labels = torch.from_numpy(digits.target[:64])


class Block(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.branch = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.SiLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x):
        return F.silu(x + self.branch(x))


torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(1, 24, 3, stride=2, padding=1),
    *(Block(24) for _ in range(4)),
    nn.Conv2d(24, 48, 3, stride=2, padding=1),
    *(Block(48) for _ in range(4)),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(48, 10),
)

# %% [markdown]
# ## The settings
# | you want | write |
# |---|---|
# | half of the memory, for the least time | `lean()` |
# | much less memory, for some time | `lean("conv")` |
# | a certain share of the activations | `lean(budget=0.4)`: at most 40 % |
# | a bound on the time | `lean(overhead=0.1)`: the least memory for a tenth of the step time |
# | no rebuild while memory suffices | `lean(limit="device")` |

# %%
settings = {
    "plain PyTorch": None,
    "lean()": {},
    'lean("conv")': {"recompute": "conv"},
    "lean(budget=0.4)": {"budget": 0.4},
    "lean(overhead=0.1)": {"overhead": 0.1},
    'lean(limit="device")': {"limit": "device"},
}


def forward(setting):
    if setting is None:
        return F.cross_entropy(model(images), labels)
    with leannorm.lean(**setting):
        return F.cross_entropy(model(images), labels)


def seconds(setting):
    model.zero_grad(set_to_none=True)
    start = perf_counter()
    forward(setting).backward()
    return perf_counter() - start


# %% [markdown]
# ## Measure
# A budget makes its plan in the first pass, and an overhead also times the steps after it. So every setting
# takes a few steps first. Then the settings alternate, and their median times are compared.

# %%
leannorm.keep_freed_memory()
for setting in settings.values():
    for _ in range(6):
        seconds(setting)

times = {name: [] for name in settings}
for _ in range(7):
    for name, setting in settings.items():
        times[name].append(seconds(setting))

memory, gradients = {}, {}
for name, setting in settings.items():
    model.zero_grad(set_to_none=True)
    memory[name] = measure_step(lambda setting=setting: forward(setting))
    gradients[name] = [p.grad for p in model.parameters()]

plain = memory["plain PyTorch"]
kept = {name: measured.held / plain.held for name, measured in memory.items()}
peak = {name: measured.peak / plain.peak for name, measured in memory.items()}
time = {name: median(times[name]) / median(times["plain PyTorch"]) for name in settings}
print(f"plain PyTorch keeps {plain.held / 1e6:.1f} MB and peaks at {plain.peak / 1e6:.1f} MB")
print(f"{'':22} kept  peak  time  gradients")
for name in settings:
    same = all(map(torch.equal, gradients["plain PyTorch"], gradients[name]))
    numbers = f"{kept[name]:.2f}  {peak[name]:.2f}  {time[name]:.2f}"
    print(f"{name:22} {numbers}  {'equal bit for bit' if same else 'different'}")

# %% [markdown]
# ## Memory and time
# Left: shorter bars are better. Right: lower and further left is better.

# %%
figure, (bars, plane) = plt.subplots(1, 2, figsize=(12, 3.6), layout="constrained")
rows = range(len(settings))
bars.barh([row - 0.2 for row in rows], kept.values(), 0.4, label="kept")
bars.barh([row + 0.2 for row in rows], peak.values(), 0.4, label="peak")
bars.set_yticks(rows, settings)
bars.invert_yaxis()
bars.set(xlabel="relative to plain PyTorch", xlim=(0, 1.3))
bars.legend(loc="upper right")
for name in settings:
    plane.plot(time[name], kept[name], "o", label=name)
plane.set(xlabel="time of a step, relative", ylabel="bytes kept, relative", ylim=(0, 1.1))
plane.legend(loc="center left", bbox_to_anchor=(1, 0.5))
plt.show()

# %% [markdown]
# `lean(limit="device")` kept everything, since there was enough memory: it rebuilds only if a batch would not
# fit otherwise. `never_out.py` has such a batch; it needs Linux and an install from source. Times differ
# between machines. `leannorm.profile(model, batch, budgets=[0.4])` prints such a table for your own model.
