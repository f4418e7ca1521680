"""From DTensors to local tensors and back: nodes of functions that torch has written in Python."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from leannorm.saving.graph import inputs_of, kind_of, kind_of_function
from leannorm.saving.localized import sign
from leannorm.saving.recipes.registry import ValueOf, recipe
from leannorm.saving.recipes.views import as_it_is
from leannorm.saving.shards import local_of, shared_as, spec_of
from leannorm.saving.steps import Step

_TO_LOCAL, _FROM_LOCAL = "leannorm._ToTorchTensor", "leannorm._FromTorchTensor"
REDISTRIBUTE = "leannorm.Redistribute"
LOCAL = {_TO_LOCAL, _FROM_LOCAL}  # their steps are on local tensors as they are
TELLING = {_TO_LOCAL, REDISTRIBUTE}  # nodes that tell how the ranks share what they read


_PLACES = {
    "torch.distributed.tensor._api": ("_ToTorchTensor", "_FromTorchTensor"),
    "torch.distributed.tensor._redistribute": ("Redistribute",),
    "torch.distributed.fsdp._fully_shard._fsdp_param_group": ("RegisterPostBackwardFunction",),
}


def know_torchs_functions() -> None:
    """Make the nodes of torch's functions known, of what is imported."""
    for place, names in _PLACES.items():
        module = sys.modules.get(place)
        for name in names:
            if hasattr(module, name):
                kind_of_function(getattr(module, name))


@recipe(_TO_LOCAL)
def to_local(node: Any, output: int, value_of: ValueOf, like: Tensor | None) -> Step | None:
    x = value_of(0)
    if x is None or x.spec is None or x.spec != node.dtensor_spec:
        return None
    return Step(as_it_is, (x,), kind="view")


@recipe(_FROM_LOCAL)
def from_local(node: Any, output: int, value_of: ValueOf, like: Tensor | None) -> Step | None:
    """Without a check of the ranks' tensors, which would be sent, the local tensor is the input."""
    x, (mesh, placements) = value_of(0), _made_for(node)
    if x is None or x.spec is not None or mesh.get_coordinate() is None:
        return None
    spec = _spec_from(x, mesh, placements) if like is None or local_of(like) is None else spec_of(like)
    whole = tuple(node._input_metadata[0].shape)
    if spec is None or tuple(spec.shape) != whole or spec.placements != placements:
        return None
    return Step(as_it_is, (x,), kind="view", spec=spec)


def _made_for(node: Any) -> tuple[Any, Any]:
    """The mesh and the placements that the local tensor was given; older releases of torch name them so."""
    if hasattr(node, "previous_device_mesh"):
        return node.previous_device_mesh, node.previous_placement
    return node.forward_input_device_mesh, node.forward_input_placements


def _spec_from(x: Any, mesh: Any, placements: Any) -> Any:
    """How ranks share a DTensor that was made without telling the shape of the whole."""
    from torch.distributed.tensor import _utils
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    shape, stride, dtype, _ = sign(x)
    local = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    shape, stride = _utils.compute_global_tensor_info(local, mesh, placements)
    return DTensorSpec(mesh, placements, tensor_meta=TensorMeta(torch.Size(shape), tuple(stride), dtype))


def _redistribute(x: Any, mesh: Any, placements: Any) -> Tensor:
    made: Tensor = x.redistribute(mesh, placements)
    return made


@recipe(REDISTRIBUTE)
def redistribute(node: Any, output: int, value_of: ValueOf, like: Tensor | None) -> Step | None:
    """The node does not tell to what: only a tensor does that was saved, or what reads it."""
    x = value_of(0)
    if x is None or x.spec is None or like is None or local_of(like) is None:
        return None
    to = spec_of(like)
    dtypes = {spec.tensor_meta.dtype for spec in (x.spec, node.current_spec, to)}
    if x.spec != node.current_spec or len(dtypes) > 1:
        return None
    kind = "view" if to.placements == x.spec.placements else "scale"
    return Step(_redistribute, (x,), (), (to.mesh, to.placements), kind=kind)


def told_by(reader: Any) -> Tensor | None:
    """A DTensor without memory, shared as the one that this node of `TELLING` reads."""
    spec = reader.dtensor_spec if kind_of(reader) == _TO_LOCAL else reader.current_spec
    source = inputs_of(reader)[0]
    if source is None or source.dtype != spec.tensor_meta.dtype:
        return None
    return shared_as(torch.empty(0, dtype=spec.tensor_meta.dtype, device="meta"), spec)
