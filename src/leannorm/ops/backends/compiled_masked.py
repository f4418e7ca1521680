"""The verbs of `reference_masked.py` as calls of operators, where results are 0 at what is no data.

With `fill="normalize"` there are no kernels of their own: the formulas of the reference call the others.
"""

from __future__ import annotations

from torch import Tensor

from leannorm._types import Moments
from leannorm.ops.backends.compiled import Compiled, dense, flat, like


class CompiledMasked(Compiled):
    """The channel family with a mask, by kernels."""

    def masked_moments(self, x: Tensor, mask: Tensor, groups: int = 0) -> Moments:
        return Moments(*self.ops.masked_moments(dense(x), mask, groups))

    def masked_normalize(
        self,
        x: Tensor,
        mask: Tensor,
        mean: Tensor,
        rstd: Tensor,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        act: str = "identity",
    ) -> Tensor:
        x = dense(x)
        statistics = mean.contiguous(), rstd.contiguous()
        epilogue = flat(weight), flat(bias), like(x, residual), act
        y: Tensor = self.ops.masked_normalize(x, mask, *statistics, *epilogue)
        return y

    def masked_grad_sums(
        self,
        dy: Tensor,
        x: Tensor,
        mask: Tensor,
        mean: Tensor,
        rstd: Tensor,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        out: Tensor | None = None,
        act: str = "identity",
    ) -> tuple[Tensor, Tensor]:
        x = dense(x)
        epilogue = flat(weight), flat(bias), like(x, residual), like(x, out), act
        statistics = mean.contiguous(), rstd.contiguous()
        sums: tuple[Tensor, Tensor] = self.ops.masked_grad_sums(like(x, dy), x, mask, *statistics, *epilogue)
        return sums

    def masked_input_grad(
        self,
        dy: Tensor,
        x: Tensor,
        mask: Tensor,
        mean: Tensor,
        rstd: Tensor,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        out: Tensor | None = None,
        p: Tensor | None = None,
        q: Tensor | None = None,
        act: str = "identity",
        want_dz: bool = False,
        zero: bool = True,
    ) -> tuple[Tensor, Tensor | None]:
        if not zero:
            given = dy, x, mask, mean, rstd, weight, bias, residual, out, p, q, act, want_dz, zero
            return super().masked_input_grad(*given)
        x = dense(x)
        epilogue = flat(weight), flat(bias), like(x, residual), like(x, out), flat(p), flat(q), act, want_dz
        statistics = mean.contiguous(), rstd.contiguous()
        dx, dz = self.ops.masked_input_grad(like(x, dy), x, mask, *statistics, *epilogue)
        return dx, dz if want_dz else None

    def masked_forward(
        self,
        x: Tensor,
        mask: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
        eps: float,
        act: str = "identity",
        groups: int = 0,
        zero: bool = True,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        if not zero:
            return super().masked_forward(x, mask, weight, bias, residual, eps, act, groups, zero)
        x = dense(x)
        epilogue = flat(weight), flat(bias), like(x, residual), eps, act
        result: tuple[Tensor, Tensor, Tensor, Tensor, Tensor] = self.ops.masked_forward(
            x, mask, *epilogue, groups
        )
        return result

    def masked_backward(
        self,
        dy: Tensor,
        x: Tensor,
        mask: Tensor,
        mean: Tensor,
        rstd: Tensor,
        count: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
        out: Tensor | None,
        act: str = "identity",
        groups: int = 0,
        want_dz: bool = False,
        zero: bool = True,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        if not zero:
            given = dy, x, mask, mean, rstd, count, weight, bias, residual, out, act, groups, want_dz, zero
            return super().masked_backward(*given)
        x = dense(x)
        epilogue = flat(weight), flat(bias), like(x, residual), like(x, out), act, groups, want_dz
        statistics = mean.contiguous(), rstd.contiguous(), count.contiguous()
        dx, dweight, dbias, dz = self.ops.masked_backward(like(x, dy), x, mask, *statistics, *epilogue)
        return dx, dweight, dbias, dz if want_dz else None
