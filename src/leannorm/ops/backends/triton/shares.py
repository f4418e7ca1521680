"""Shares of dweight and dbias, from programs or samples, and the launch that adds them up."""

from __future__ import annotations

import torch

from leannorm._types import Maybe
from leannorm.ops.backends.triton.launch import launch
from leannorm.ops.backends.triton.row_share_kernels import sum_shares
from leannorm.ops.backends.triton.tape import empty

# what a program of `sum_shares` reads at a time: this many shares, of this many columns
_MANY, _FEW = {"COUNT": 256, "BLOCK": 16}, {"COUNT": 16, "BLOCK": 256}


class Shares:
    """Space for `count` shares of dweight and dbias in this dtype, until `add_up`; a single share is the
    gradient itself.

    With `groups`, that many shares for each group.
    """

    def __init__(
        self, dweight: Maybe, dbias: Maybe, count: int, kept: int, dtype: torch.dtype, groups: int = 1
    ) -> None:
        self.wanted, self.count, self.kept, self.groups = (dweight, dbias), count, kept, groups
        self.dweight, self.dbias = dweight, dbias
        if count == 1 or dweight is None:
            return
        vectors = 1 if dbias is None else 2
        self.all = empty((vectors, groups * count, kept), dtype, dweight.device)
        self.dweight, self.dbias = self.all[0], None if dbias is None else self.all[1]

    def add_up(self) -> None:
        dweight = self.wanted[0]
        if self.count == 1 or dweight is None:
            return
        tile = _FEW if self.count <= _FEW["COUNT"] else _MANY
        programs = len(self.all) * self.groups * -(-self.kept // tile["BLOCK"])
        arguments = (self.all, *self.wanted, self.count, self.kept, self.groups)
        launch(sum_shares, programs, dweight.device, *arguments, warps=8, **tile)
