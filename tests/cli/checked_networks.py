"""Networks that `leannorm check --model` is asked about."""

import torch.nn.functional as F
from torch import nn


class EditedUnseen(nn.Module):
    """From the third pass on it edits a norm's output where no operator is called."""

    passes = 0

    def forward(self, x):
        self.passes += 1
        if self.passes > 2:
            x.detach().numpy()[0, 0] += 1
        return F.relu(x)


def network(act):
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), act, nn.Conv2d(8, 8, 3), nn.Dropout(0.2))


def sound():
    return network(nn.SiLU())


def edited_unseen():
    return network(EditedUnseen())
