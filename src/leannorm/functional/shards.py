"""Norms of DTensors: each rank runs the norm on its local tensors, with our kernels.

A DTensor means the whole tensor. So statistics over an axis that is cut are merged over the ranks that hold
its parts, and so is whatever else is summed along it; all other norms are local. What is not as the norm needs
it is redistributed, as torch's own operators do: the input, where a row or the sum of its parts is cut, and
each other tensor, to the ranks that hold what it belongs to.

One table says how: for every tensor of a call, the axis of the input that each of its own axes follows. Along
a dimension of the mesh that cuts axis d of the input, a tensor with an axis that follows d is cut there, and so
is its gradient; one without is whole on every rank, and its gradient is the sum of the ranks' parts (`Partial`,
as torch's own norms leave it).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from leannorm._errors import InputError
from leannorm._types import Epilogue, MaybeTensor, Running
from leannorm.autograd.sync import Sharing
from leannorm.distributed.membership import mesh_group, ranks_of
from leannorm.functional.valid import UNMASKED, Masking, positions_of_data

Axes = Sequence[int]
VECTOR = (1,)  # one value a channel


def _placed(v: Tensor, mesh: Any, placements: Any) -> Tensor:
    return v if v.placements == placements else v.redistribute(mesh, placements)  # type: ignore


class Cut:
    """A call on DTensors: `axes` has the input's axis that each dimension of the mesh cuts, or None.

    Axes in `whole` may not be cut: along these, and where a rank holds a term of a sum, `x` is the input
    redistributed.
    """

    def __init__(self, x: Tensor, others: Sequence[Tensor | None], whole: Collection[int] = ()) -> None:
        from torch.distributed.tensor import Partial, Replicate, Shard

        self._partial, self._replicate, self._shard = Partial, Replicate, Shard
        for v in (x, *others):
            if v is not None and getattr(v, "device_mesh", None) != getattr(x, "device_mesh", 0):
                raise InputError(
                    "a norm takes DTensors of one mesh, or none, got "
                    f"{' and '.join(sorted({_in_words(t) for t in (x, *others) if t is not None}))}; "
                    "torch.distributed.tensor.distribute_module(layer, mesh) and distribute_tensor(x, mesh, "
                    "placements) make DTensors, and x.to_local() is this rank's part"
                )
        self.mesh: Any = x.device_mesh
        self.axes = [
            p.dim if type(p) is Shard and p.dim not in whole else None
            for p in x.placements  # type: ignore
        ]
        self.placements = tuple(Replicate() if axis is None else Shard(axis) for axis in self.axes)
        self.x = _placed(x, self.mesh, self.placements)
        self.shape = x.shape

    def along(self, axes: Axes) -> tuple[Any, Any]:
        """The placements of a tensor whose axes follow these ones of the input, and those of its gradient."""
        places = [self._replicate() if i not in axes else self._shard(axes.index(i)) for i in self.axes]
        parts = [p if i is None or i in axes else self._partial() for i, p in zip(self.axes, places)]
        return tuple(places), tuple(parts)

    def local(self, v: MaybeTensor, axes: Axes) -> MaybeTensor:
        """This rank's part of a tensor."""
        if v is None:
            return v
        placements, of_gradient = self.along(axes)
        part: Tensor = _placed(v, self.mesh, placements).to_local(grad_placements=of_gradient)
        return part

    def whole(self, part: Tensor, axes: Axes, shape: Sequence[int] | None = None) -> Tensor:
        """The DTensor of all ranks' parts."""
        from torch.distributed.tensor import DTensor

        shape = torch.Size(self.shape[i] for i in axes) if shape is None else torch.Size(shape)
        strides, step = [1] * len(shape), 1
        for i in sorted(range(len(shape)), key=lambda i: (part.stride(i), -i)):
            strides[i], step = step, step * max(shape[i], 1)
        return DTensor.from_local(
            part, self.mesh, self.along(axes)[0], run_check=False, shape=shape, stride=tuple(strides)
        )

    @torch.no_grad()
    def write_back(self, v: Tensor | None, part: Tensor | None, axes: Axes) -> None:
        """Store a part that was written to, where it is not the memory of the DTensor itself."""
        if v is not None and part is not None and v.placements != self.along(axes)[0]:  # type: ignore
            made = _placed(self.whole(part, axes, v.shape), self.mesh, v.placements)  # type: ignore
            v.to_local().copy_(made.to_local())  # type: ignore

    def merged(self, axes: Collection[int], name: str, eps: float, groups: int = 0) -> Sharing | None:
        """How statistics over these axes are merged; None where no other rank has a part."""
        dims = tuple(i for i, axis in enumerate(self.axes) if axis in axes and self.mesh.size(i) > 1)
        return Sharing(mesh_group(self.mesh, dims), name, eps=eps, groups=groups) if dims else None

    def is_whole(self, axes: Collection[int]) -> bool:
        """Is none of these axes cut?"""
        return not any(axis in axes for axis in self.axes)

    def holds_rank_of(self, group: str) -> bool:
        """Is another rank of the group among those that hold the DTensor?"""
        mine, theirs = set(self.mesh.mesh.flatten().tolist()), set(ranks_of(group))
        return len(mine & theirs) > 1

    def cuts_between(self, axis: int, unit: int) -> bool:
        """Is this axis cut between blocks of so many indices alone?"""
        size = self.shape[axis]
        for i, cut in enumerate(self.axes):
            if cut == axis:
                size = -(-size // self.mesh.size(i))  # of each part but the last ones, as torch.chunk has it
                if size % unit:
                    return False
        return True

    def refuse(self, rule: str, axes: Collection[int]) -> InputError:
        """The error for an input that is cut along one of these axes."""
        uncut = ", ".join(
            f"Shard({i})" if i is not None and i not in axes else "Replicate()" for i in self.axes
        )
        return InputError(
            f"{rule}, got shape {tuple(self.shape)} and placements {self.placements}; "
            f"pass input.redistribute(placements=[{uncut}])"
        )

    def mask(self, masking: Masking, kept: tuple[int, int] = (1, 2)) -> Masking:
        """This rank's part of a mask; lengths become one."""
        found = positions_of_data(self.x, *masking, kept)
        if found is None:
            return masking
        positions = [i for i in range(len(self.shape)) if not kept[0] <= i < kept[1]]
        axes = self.following(found, positions[len(positions) - found.dim() :])
        if not hasattr(found, "placements"):  # made of lengths, on every rank
            from torch.distributed.tensor import DTensor

            everywhere = (self._replicate(),) * self.mesh.ndim
            found = DTensor.from_local(found, self.mesh, everywhere, run_check=False)
        return self.local(found, axes), None, masking[2]

    def following(self, v: Tensor, axes: Axes) -> Axes:
        """The axes, without those (-1) along which `v` has one value for all indices."""
        return [i if size == self.shape[i] else -1 for i, size in zip(axes, v.shape, strict=True)]


def by_channel(
    run: Callable[[Cut, Tensor, Running, Epilogue, Masking], Tensor],
    x: Tensor,
    running: Running,
    epilogue: Epilogue,
    masking: Masking,
    moves: bool = False,
) -> Tensor:
    """A per-channel norm of DTensors: `run` of the local ones. Does it move the running statistics?"""
    weight, bias, residual, act = epilogue
    elements = range(x.dim())
    cut = Cut(x, (*running[:3], weight, bias, residual, masking[0]))
    mean, var = (cut.local(v, VECTOR) for v in running[:2])
    parts = Running(mean, var, cut.local(running.num_batches, ()), running.momentum)
    affine = cut.local(weight, VECTOR), cut.local(bias, VECTOR)
    behind = Epilogue(*affine, cut.local(residual, elements), act)
    y = run(cut, cut.local(cut.x, elements), parts, behind, cut.mask(masking))
    if moves:
        cut.write_back(running.mean, mean, VECTOR)
        cut.write_back(running.var, var, VECTOR)
    return cut.whole(y, elements)


def without_channels(x: Tensor, epilogue: Epilogue) -> Tensor:
    """What a rank that holds no channels has of a norm: nothing, of which gradients go back."""
    y = x.clone()
    for v in epilogue[:2]:
        y = y if v is None else y + v.view(-1, *(1,) * (x.dim() - 2)).to(y.dtype)
    return y if epilogue.residual is None else y + epilogue.residual.to(y.dtype)


def by_row(
    run: Callable[..., Any],
    tensors: Sequence[Tensor | None],
    axes: Sequence[Axes],
    normalized: tuple[int, int],
    masking: Masking = UNMASKED,
) -> Any:
    """A row norm of DTensors: `run(*local tensors, mask)`; its results have the axes of the first tensor."""
    x, *others = tensors
    assert x is not None
    cut = Cut(x, (*others, masking[0]), range(*normalized))
    parts = [cut.local(v, of) for v, of in zip((cut.x, *others), axes, strict=True)]
    made = run(*parts, cut.mask(masking, normalized)[0])
    if isinstance(made, Tensor):
        return cut.whole(made, axes[0])
    return tuple(cut.whole(part, axes[0]) for part in made)


def modulation(v: Tensor | None, x: Tensor, start: int) -> Axes:
    """The axes of a scale, shift or gate: the normalized ones, behind the input's first ones or 1."""
    if v is None:
        return ()
    first = v.dim() - (x.dim() - start)
    return [*(i if v.shape[i] == x.shape[i] else -1 for i in range(first)), *range(start, x.dim())]


def _in_words(v: Tensor) -> str:
    mesh = getattr(v, "device_mesh", None)
    return "a plain tensor" if mesh is None else f"a DTensor of {mesh}"
