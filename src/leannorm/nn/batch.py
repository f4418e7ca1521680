"""BatchNorm1d, 2d and 3d: torch's layers, with leannorm's kernels."""

from __future__ import annotations

import torch.nn

from leannorm.nn._base import BatchNormBase


class BatchNorm1d(BatchNormBase, torch.nn.BatchNorm1d):
    """Batch norm over (N, C) or (N, C, L); replaces `torch.nn.BatchNorm1d`, same state_dict both ways.

        y = (x - E[x]) / sqrt(Var[x] + eps) * weight + bias

    E and the biased Var are per channel, over the batch and all positions. In training they are the batch's,
    and update `running_mean` and `running_var` (unbiased) by `momentum`; with `momentum=None` those are the
    average over all batches. In evaluation they are the running ones, or the batch's if there are none
    (`track_running_stats=False`). Parameters and defaults are torch's. Runs under
    `torch.compile(fullgraph=True)`, with `momentum=None` too; `torch.func` transforms and double backward
    work.

    An empty batch, or one whose statistics are not all finite, updates neither running statistics nor
    counter. The running statistics keep `stats_dtype` whatever the layer is cast to. With `group_size` each
    group of that many samples is normalized by its own statistics (ghost batch norm; the last group may be
    smaller); the running ones are of the whole batch.

    Shapes: input (N, C) or (N, C, L), in any memory layout; output as input.
    Dtypes: as `functional.batch_norm`.
    Kept: the input (4 bytes per element in float32) and 16 bytes per channel.
    Raises: as `functional.batch_norm`, and `InputError` for another number of axes.
    Source: Ioffe and Szegedy, 2015, arXiv:1502.03167; groups: Hoffer, Hubara and Soudry, 2017,
    arXiv:1705.08741.

    >>> import torch
    >>> from leannorm import nn
    >>> nn.BatchNorm1d(4)(torch.randn(16, 4)).shape
    torch.Size([16, 4])
    """

    dims = (2, 3)


class BatchNorm2d(BatchNormBase, torch.nn.BatchNorm2d):
    """Batch norm over (N, C, H, W); replaces `torch.nn.BatchNorm2d`, same state_dict both ways.

        y = (x - E[x]) / sqrt(Var[x] + eps) * weight + bias

    Statistics, `stats_dtype` and `group_size` are those of `BatchNorm1d`.

    Shapes: input (N, C, H, W), contiguous, channels_last or any other layout; output as input.
    Dtypes: as `functional.batch_norm`.
    Kept, Raises, Source: as `BatchNorm1d`.

    >>> import torch
    >>> from leannorm import nn
    >>> nn.BatchNorm2d(4)(torch.randn(2, 4, 8, 8)).shape
    torch.Size([2, 4, 8, 8])
    """

    dims = (4,)


class BatchNorm3d(BatchNormBase, torch.nn.BatchNorm3d):
    """Batch norm over (N, C, D, H, W); replaces `torch.nn.BatchNorm3d`, same state_dict both ways.

        y = (x - E[x]) / sqrt(Var[x] + eps) * weight + bias

    Statistics, `stats_dtype` and `group_size` are those of `BatchNorm1d`.

    Shapes: input (N, C, D, H, W), contiguous, channels_last_3d or any other layout; output as input.
    Dtypes: as `functional.batch_norm`.
    Kept, Raises, Source: as `BatchNorm1d`.

    >>> import torch
    >>> from leannorm import nn
    >>> nn.BatchNorm3d(4)(torch.randn(2, 4, 2, 8, 8)).shape
    torch.Size([2, 4, 2, 8, 8])
    """

    dims = (5,)
