# %% [markdown]
# # A batch norm that misbehaves
#
# A network learns handwritten digits, but its accuracy in evaluation is far below that in training.
# `leannorm.doctor` says why, in which layers, and prints the lines that fix it.
#
# This notebook is made from `misbehaving_norm.py` by `python examples/make_notebook.py`. It needs
# scikit-learn and matplotlib.

# %%
import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import leannorm

# %% [markdown]
# ## Data and model
# The momentum of the batch norms was copied from another framework, where 0.99 is the weight of the *old*
# statistics. In PyTorch it is the weight of the new ones.

# %%
torch.manual_seed(0)
digits = load_digits()
order = torch.randperm(len(digits.target))
images = torch.from_numpy(digits.images).float().unsqueeze(1)[order] / 8 - 1
labels = torch.from_numpy(digits.target)[order]
test_images, test_labels = images[1301:], labels[1301:]
images, labels = images[:1301], labels[:1301]


def conv_norm(channels_in, channels, stride=1):
    conv = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(channels, momentum=0.99), nn.ReLU())


model = nn.Sequential(
    conv_norm(1, 16),
    conv_norm(16, 32, stride=2),
    conv_norm(32, 32),
    conv_norm(32, 32),
    conv_norm(32, 64, stride=2),
    conv_norm(64, 64),
    conv_norm(64, 64),
    nn.Flatten(),
    nn.Linear(4 * 64, 10),
)


# %% [markdown]
# ## Train
# 1,301 images in batches of 100: the last batch of an epoch has one image.


# %%
def train(epochs=8):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.03, total_steps=14 * epochs)
    for _ in range(epochs):
        right = 0
        for rows in torch.randperm(1301).split(100):
            output = model(images[rows])
            right += (output.argmax(1) == labels[rows]).sum().item()
            optimizer.zero_grad()
            F.cross_entropy(output, labels[rows]).backward()
            optimizer.step()
            schedule.step()
    return right / 1301


def evaluate():
    model.eval()
    with torch.no_grad():
        right = model(test_images).argmax(1) == test_labels
    model.train()
    return right.float().mean().item()


print(f"accuracy in training, last epoch: {train():.3f}")
print(f"accuracy in evaluation:           {evaluate():.3f}")

# %% [markdown]
# ## What is wrong?
# `doctor` gets the model and some batches. It changes nothing.

# %%
batches = list(images.split(100))
before = leannorm.doctor(model, batches)
print(before)

# %% [markdown]
# ## The remedy, as printed
# The weights stay as they are. `recalibrate` measures the statistics again.

# %%
for name in ["0.1", "1.1", "2.1", "3.1", "4.1", "5.1", "6.1"]:
    model.get_submodule(name).momentum = 0.01
leannorm.recalibrate(model, batches)

# %%
after = leannorm.doctor(model, batches)
print(f"accuracy in evaluation: {evaluate():.3f}")
print(f"findings: {len(after.findings)}")

# %% [markdown]
# ## The gap of every layer
# The gap is the distance of the batches' statistics from the running ones, in running standard deviations.

# %%
figure, axis = plt.subplots(figsize=(7, 3), layout="constrained")
rows = range(len(before.layers))
axis.bar([row - 0.2 for row in rows], [layer.gap for layer in before.layers], 0.4, label="as trained")
axis.bar([row + 0.2 for row in rows], [layer.gap for layer in after.layers], 0.4, label="recalibrated")
axis.set_xticks(rows, [layer.name for layer in before.layers])
axis.set(xlabel="batch norm", ylabel="gap")
axis.legend()
plt.show()
