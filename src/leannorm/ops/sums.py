"""Statistics as sums that ranks add up in any order without a loss of precision.

Taking statistics from the plain sums n, n*mean and M2 + n*mean**2 cancels: in float64 the variance has no
correct digit once mean/std passes 1e8, and at 1e4 it has lost half of them. Here the mean is split into
its 12 leading bits s and the rest d. The sums of n*s and n*s*s are whole multiples of one unit, which
float64 adds without rounding up to 2**29 values per channel, and everything else is 2**11 times smaller.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from leannorm._types import Moments
from leannorm.ops.precision import power

HEADER = 7  # values before the sums: active, two tokens and their squares, the requested size, the count

_SPLIT = float(2**41 + 1)  # Veltkamp's constant, which keeps 53 - 41 = 12 bits


def _leading_bits(v: Tensor) -> Tensor:
    shifted = v * _SPLIT
    lead = shifted - (shifted - v)
    return torch.where(lead.isfinite(), lead, v)


def _if_finite(lead: Tensor, rest: Tensor) -> Tensor:
    """The rest to add to the leading bits: 0 if these are infinite or NaN."""
    return torch.where(lead.isfinite(), rest, torch.zeros_like(rest))


class SumVerbs:
    """From statistics to sums, which ranks add up, and back."""

    def sums_of(self, moments: Moments) -> Tensor:
        """The moments of one set as 4 C sums; add those of several sets (and their counts) to merge them."""
        n, mean = moments.count, moments.mean
        lead = _leading_bits(mean)
        rest = _if_finite(lead, mean - lead)
        n_lead, n_rest = n * lead, n * rest
        square_rest = torch.addcmul(moments.m2, rest, torch.add(n_rest, n_lead, alpha=2))
        return torch.cat((n_lead, n_rest, n_lead * lead, square_rest))

    def message_of(
        self,
        sums: Sequence[Tensor],
        token: tuple[int, int],
        asked: int,
        count: int | Tensor,
        size: int,
        device: torch.device,
    ) -> Tensor:
        """The header (1, tokens and their squares, `asked`, `count`), the sums, zeros up to `size` values.

        On a device the header's numbers are arguments of kernels: copying a tensor of them there would make
        the host wait for the device, and caching one for every count would grow without end.
        """
        t, u = token
        known = 0 if isinstance(count, Tensor) else count
        header = 1, t, t * t, u, u * u, asked, known
        room = HEADER + sum(map(Tensor.numel, sums))
        if device.type == "cpu":
            front = torch.frombuffer(array("d", header), dtype=torch.float64)
            if isinstance(count, Tensor):
                front[HEADER - 1] = count
            return torch.cat((front, *sums, torch.zeros(size - room, dtype=torch.float64)))
        message = torch.zeros(size, dtype=torch.float64, device=device)
        for place, value in enumerate(header):
            message.narrow(0, place, 1).fill_(value)
        if isinstance(count, Tensor):
            message[HEADER - 1].copy_(count)
        if sums:
            torch.cat(tuple(sums), out=message.narrow(0, HEADER, room - HEADER))
        return message

    def moments_of(self, total: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Mean, M2, rstd and count of the union of all sets; zeros if there is no value.

        `total` is the count followed by the `sums_of`, each summed over the sets.
        """
        count, sums = total[0].detach().clone(), total[1:]  # a view would keep the whole message alive
        n_lead, n_rest, square_lead, square_rest = sums.chunk(4)
        n = count.clamp_min(1)
        lead = _leading_bits((n_lead + n_rest) / n)
        # n * mean without its leading part, which is subtracted first: the rest is small and rounds little
        n_merged = n * lead
        n_left = (n_lead - n_merged) + n_rest
        left = n_left / n
        between = torch.addcmul(square_lead, n_merged, lead, value=-1)
        between = torch.addcmul(between, n_left, torch.add(left, lead, alpha=2), value=-1)
        m2 = (square_rest + between).clamp_min(0)
        return lead + _if_finite(lead, left), m2, power(m2 / n + eps, -0.5), count

    def means_of(self, total: Tensor, weight: Tensor | None, count: Tensor) -> tuple[Tensor, Tensor]:
        """p and q of the input gradient: the sums of dz and of dz*xhat, times the weight, over the count.

        `total` is one value that is not read, followed by the two sums, each summed over the sets.
        """
        sums = total[1:].unflatten(0, (2, total.numel() // 2))
        p, q = (sums if weight is None else sums * weight.to(sums.dtype)) / count.clamp_min(1)
        return p, q
