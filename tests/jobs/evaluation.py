"""Trains on digits: good in training, bad in evaluation. Its momentum is as another framework has it."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

torch.manual_seed(0)
digits = load_digits()
order = torch.randperm(len(digits.target))
images = torch.from_numpy(digits.images).float().unsqueeze(1)[order] / 8 - 1
labels = torch.from_numpy(digits.target)[order]
train, test = slice(0, 1301), slice(1301, None)


def batches():
    return list(images[train].split(100))


def conv_norm(channels_in, channels, stride=1):
    conv = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(channels, momentum=0.99), nn.ReLU())


def network():
    return nn.Sequential(
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


def load():
    model = network()
    model.load_state_dict(torch.load("digits.pt"))
    return model


def fit(model, epochs=8):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.03, total_steps=14 * epochs)
    for _ in range(epochs):
        right = 0
        for rows in torch.randperm(1301).split(100):  # the last batch has one image
            output = model(images[rows])
            right += (output.argmax(1) == labels[rows]).sum().item()
            optimizer.zero_grad()
            F.cross_entropy(output, labels[rows]).backward()
            optimizer.step()
            schedule.step()
    return right / 1301


def accuracy(model):
    with torch.no_grad():
        right = model.eval()(images[test]).argmax(1) == labels[test]
    return right.float().mean().item()


if __name__ == "__main__":
    model = network()
    print(f"training: {fit(model):.3f}")
    torch.save(model.state_dict(), "digits.pt")
    print(f"evaluation: {accuracy(model):.3f}")
