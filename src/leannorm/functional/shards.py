"""Norms of DTensors: each rank runs the norm on its local tensors, with our kernels.

A DTensor means the whole tensor. So statistics over a sharded axis are merged over the ranks that have its
shards; all other norms are local. A tensor whose placement does not suit the norm is redistributed, as
torch's own operators do: the input, if rows are sharded or ranks have the terms of a sum, and each other
tensor, to the ranks that have what it belongs to.

One table says how: the axis of the input that each axis of a tensor follows. If a dimension of the mesh
shards axis d of the input, a tensor with an axis that follows d is sharded there, and so is its gradient. A
tensor without such an axis is whole on every rank, and its gradient is the sum of the ranks' parts:
`Partial`, as torch's own norms leave it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from leannorm._errors import InputError
from leannorm._types import Channels, ChannelTensors, MaybeTensor
from leannorm.autograd.sync import Sharing
from leannorm.distributed.membership import mesh_group, ranks_of
from leannorm.functional.valid import UNMASKED, Masking, positions_of_data
from leannorm.ops.modes import traced

Axes = Sequence[int]
VECTOR = (1,)  # one value per channel


def _placed(v: Any, mesh: Any, placements: Any) -> Any:
    return v if v.placements == placements else _differentiable_twice(v.redistribute(mesh, placements))


def _differentiable_twice(made: Any) -> Any:
    """The result of `to_local` or `redistribute`, with a gradient that every torch can differentiate."""
    if not traced() and made.grad_fn is not None:
        made.grad_fn.register_hook(_joined_to_the_graph)
    return made


def _joined_to_the_graph(made: tuple[Any, ...], incoming: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Older releases of torch detach the gradient, so that no second derivative flows back."""
    gradient, x = made[0], incoming[0]
    if x is None or gradient is None or not x.requires_grad or gradient.grad_fn is not None:
        return None
    mesh, placements = gradient.device_mesh, gradient.placements
    if not hasattr(x, "placements"):
        from torch.distributed.tensor import DTensor

        geometry: Any = {"run_check": False, "shape": gradient.shape, "stride": gradient.stride()}
        return DTensor.from_local(x, mesh, placements, **geometry), *made[1:]
    return _differentiable_twice(x.redistribute(mesh, placements)), *made[1:]


def of_one_mesh(*tensors: Tensor | None) -> None:
    """Whether all are DTensors of one mesh. A plain tensor could mean the whole or a part."""
    present = [v for v in tensors if v is not None]
    if len({getattr(v, "device_mesh", None) for v in present}) > 1:
        raise InputError(
            "a norm takes DTensors of one mesh, or none, got "
            f"{' and '.join(sorted({_in_words(v) for v in present}))}; "
            "torch.distributed.tensor.distribute_module(layer, mesh) and distribute_tensor(x, mesh) make "
            "DTensors, and x.to_local() is this rank's part"
        )


class Cut:
    """How a tensor of this shape is sharded: for each dimension of the mesh the tensor's axis, or None."""

    def __init__(self, mesh: Any, axes: Sequence[int | None], shape: torch.Size) -> None:
        from torch.distributed.tensor import Partial, Replicate, Shard

        self.mesh, self.axes, self.shape = mesh, axes, shape
        self._partial, self._replicate, self._shard = Partial, Replicate, Shard
        self.placements = self.along(range(len(shape)))[0]

    @classmethod
    def of(cls, x: Any, whole: Collection[int] = ()) -> Cut:
        """Sharded as the DTensor, except for the axes in `whole` and for dimensions along which ranks have
        the terms of a sum."""
        from torch.distributed.tensor import Shard

        axes = [p.dim if type(p) is Shard and p.dim not in whole else None for p in x.placements]
        return cls(x.device_mesh, axes, x.shape)

    def along(self, axes: Axes) -> tuple[Any, Any]:
        """The placements of a tensor whose axes follow these axes of the input, and those of its gradient."""
        places = [self._replicate() if i not in axes else self._shard(axes.index(i)) for i in self.axes]
        parts = [
            p if i is None or i in axes else self._partial() for i, p in zip(self.axes, places, strict=True)
        ]
        return tuple(places), tuple(parts)

    def local(self, v: MaybeTensor, axes: Axes) -> MaybeTensor:
        """This rank's part of a tensor."""
        if v is None:
            return v
        placements, of_gradient = self.along(axes)
        placed = _placed(v, self.mesh, placements)
        part: Tensor = _differentiable_twice(placed.to_local(grad_placements=of_gradient))
        return part

    def passed_on(self, v: MaybeTensor, axes: Axes) -> MaybeTensor:
        """`local`, for a tensor whose gradient may share memory with another one: then it is copied.

        Autograd adds to a gradient in place if it sees a single owner, and it does not see who else uses the
        memory of a DTensor's local tensor.
        """
        part = self.local(v, axes)
        if part is not None and part.requires_grad and not traced():
            part.register_hook(torch.clone)
        return part

    def running(self, mean: Any, var: Any, count: Any) -> tuple[Any, Any, Any]:
        """This rank's part of running statistics."""
        return self.local(mean, VECTOR), self.local(var, VECTOR), self.local(count, ())

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

    def write_back(self, statistics: Sequence[Any], parts: Sequence[Tensor | None]) -> None:
        """Copy back the parts of running statistics that were written to and are not the DTensors' own
        memory."""
        for v, part in zip(statistics, parts, strict=True):
            if v is not None and part is not None and v.placements != self.along(VECTOR)[0]:
                with torch.no_grad():
                    made = _placed(self.whole(part, VECTOR, v.shape), self.mesh, v.placements)
                    v.to_local().copy_(made.to_local())

    def merged(self, axes: Collection[int], name: str, norm: Channels) -> Sharing | None:
        """How statistics over these axes are merged; None if no other rank has a part."""
        dims = tuple(i for i, axis in enumerate(self.axes) if axis in axes and self.mesh.size(i) > 1)
        return Sharing(mesh_group(self.mesh, dims), name, norm=norm) if dims else None

    def is_whole(self, axes: Collection[int]) -> bool:
        """Whether none of these axes is sharded."""
        return not any(axis in axes for axis in self.axes)

    def holds_rank_of(self, group: str) -> bool:
        """Whether another rank of the group also has a part of the DTensor."""
        mine, theirs = set(self.mesh.mesh.flatten().tolist()), set(ranks_of(group))
        return len(mine & theirs) > 1

    def cuts_between(self, axis: int, unit: int) -> bool:
        """Whether this axis is sharded only between blocks of this many indices."""
        size = self.shape[axis]
        for i, cut in enumerate(self.axes):
            if cut == axis:
                size = -(-size // self.mesh.size(i))  # of each part but the last ones, as in torch.chunk
                if size % unit:
                    return False
        return True

    def refuse(self, rule: str, axes: Collection[int]) -> InputError:
        """The error for an input that is sharded along one of these axes."""
        uncut = ", ".join(
            f"Shard({i})" if i is not None and i not in axes else "Replicate()" for i in self.axes
        )
        return InputError(
            f"{rule}, got shape {tuple(self.shape)} and placements {self.placements}; "
            f"pass input.redistribute(placements=[{uncut}])"
        )

    def mask(self, x: Tensor, masking: Masking, kept: tuple[int, int] = (1, 2)) -> Masking:
        """This rank's part of a mask; lengths become a mask."""
        mask = positions_of_data(x, *masking, kept)
        if mask is None:
            return masking
        positions = [i for i in range(len(self.shape)) if not kept[0] <= i < kept[1]]
        axes = self.following(mask, positions[len(positions) - mask.dim() :])
        if not hasattr(mask, "placements"):  # computed from lengths on every rank
            from torch.distributed.tensor import DTensor

            everywhere = (self._replicate(),) * self.mesh.ndim
            mask = DTensor.from_local(mask, self.mesh, everywhere, run_check=False)
        return self.local(mask, axes), None, masking[2]

    def following(self, v: Tensor, axes: Axes) -> Axes:
        """The axes, without those (-1) along which `v` has one value for all indices."""
        return [i if size == self.shape[i] else -1 for i, size in zip(axes, v.shape, strict=True)]


def by_channel(
    run: Callable[[Cut, Any, Masking], Tensor],
    tensors: Sequence[Any],
    masking: Masking,
    moves: bool,
) -> Tensor:
    """A per-channel norm of DTensors: `run` on the local ones. `moves`: whether it updates the running
    statistics."""
    x, weight, bias, residual, *running = tensors
    elements = range(x.dim())
    of_one_mesh(*tensors, masking[0])
    cut = Cut.of(x)
    parts = cut.running(*running)
    affine = cut.local(weight, VECTOR), cut.local(bias, VECTOR)
    added = cut.passed_on(residual, elements)
    y = run(cut, (cut.local(x, elements), *affine, added, *parts), cut.mask(x, masking))
    if moves:
        cut.write_back(running[:2], parts[:2])
    return cut.whole(y, elements)


def without_channels(tensors: ChannelTensors) -> Tensor:
    """The results of a rank without channels: empty, but connected to the graph."""
    x, weight, bias, residual, *_ = tensors
    y = x.clone()
    for v in (weight, bias):
        y = y if v is None else y + v.view(-1, *(1,) * (x.dim() - 2)).to(y.dtype)
    return y if residual is None else y + residual.to(y.dtype)


def by_row(
    run: Callable[..., Any],
    tensors: Sequence[Tensor | None],
    axes: Sequence[Axes],
    normalized: tuple[int, int],
    masking: Masking = UNMASKED,
) -> Any:
    """A row norm of DTensors: `run(*local tensors, mask)`; its results have the axes of the first tensor."""
    x = tensors[0]
    assert x is not None
    of_one_mesh(*tensors, masking[0])
    cut = Cut.of(x, range(*normalized))
    pairs = list(zip(tensors, axes, strict=True))
    several = tensors[1] is not None and axes[1] == axes[0]  # with a residual: it has the gradient of the sum
    parts = [cut.passed_on(v, of) if several and of == axes[0] else cut.local(v, of) for v, of in pairs]
    made = run(*parts, cut.mask(x, masking, normalized)[0])
    if isinstance(made, Tensor):
        return cut.whole(made, axes[0])
    return cut.whole(made[0], axes[0]), cut.whole(made[1], axes[0]) if several else x


def modulation(v: Tensor | None, x: Tensor, start: int) -> Axes:
    """The axes of a scale, shift or gate: the normalized ones, after leading ones of the input or of size
    1."""
    if v is None:
        return ()
    first = v.dim() - (x.dim() - start)
    return [*(i if v.shape[i] == x.shape[i] else -1 for i in range(first)), *range(start, x.dim())]


def _in_words(v: Tensor) -> str:
    mesh = getattr(v, "device_mesh", None)
    return "a plain tensor" if mesh is None else f"a DTensor of {mesh}"
