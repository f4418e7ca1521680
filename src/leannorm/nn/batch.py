"""BatchNorm1d, 2d and 3d: torch's layers, computed by leannorm."""

from __future__ import annotations

import torch.nn

from leannorm.nn._base import BatchNormBase


class BatchNorm1d(BatchNormBase, torch.nn.BatchNorm1d):
    r"""Batch norm over (N, C) or (N, C, L); replaces `torch.nn.BatchNorm1d`, same state_dict both ways.

    .. math:: y = (x - \mathrm{E}[x]) / \sqrt{\mathrm{Var}[x] + \epsilon} \cdot \gamma + \beta

    Mean and biased variance are per channel, over the batch and all positions. In training they are the
    batch's, and `running_mean` and `running_var` (unbiased) move towards them by `momentum`; with
    `momentum=None` they are the average over all batches. In evaluation they are the running ones, or the
    batch's where there are none (`track_running_stats=False`).

    Parameters, defaults and errors are torch's. Input float32, float64, bfloat16 or float16, any memory
    layout; the output has the input's dtype and layout. Kept for the backward pass: the input (its own
    bytes) and 16 bytes a channel. Runs under `torch.compile(fullgraph=True)`, with `momentum=None` too;
    `torch.func` transforms and double backward work.
    Source: Ioffe and Szegedy, 2015, arXiv:1502.03167.

    >>> import torch
    >>> from leannorm import nn
    >>> nn.BatchNorm1d(4)(torch.randn(16, 4)).shape
    torch.Size([16, 4])
    """

    dims = (2, 3)


class BatchNorm2d(BatchNormBase, torch.nn.BatchNorm2d):
    """Batch norm over (N, C, H, W); replaces `torch.nn.BatchNorm2d`. See `BatchNorm1d`.

    >>> import torch
    >>> from leannorm import nn
    >>> nn.BatchNorm2d(4)(torch.randn(2, 4, 8, 8)).shape
    torch.Size([2, 4, 8, 8])
    """

    dims = (4,)


class BatchNorm3d(BatchNormBase, torch.nn.BatchNorm3d):
    """Batch norm over (N, C, D, H, W); replaces `torch.nn.BatchNorm3d`. See `BatchNorm1d`.

    >>> import torch
    >>> from leannorm import nn
    >>> nn.BatchNorm3d(4)(torch.randn(2, 4, 2, 8, 8)).shape
    torch.Size([2, 4, 2, 8, 8])
    """

    dims = (5,)
