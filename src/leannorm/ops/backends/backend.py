"""What a backend is: the verbs of both families, and the tensors that it can compute on."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from leannorm.ops.backends.reference import ChannelVerbs
from leannorm.ops.backends.reference_gated import GatedVerbs
from leannorm.ops.sums import SumVerbs


class Backend(ChannelVerbs, GatedVerbs, SumVerbs, ABC):
    """One implementation of the verbs. It inherits their definition in plain torch, and replaces it with
    kernels.

    Each backend has one instance, in its module under its name in capitals; pickle and copy return that one.
    """

    name: str
    launches = False  # whether each operator is a launch on a device
    as_given = False  # whether tensors are passed to the kernels as they are (`ops/as_given.py`)

    @abstractmethod
    def why_not(self, *tensors: Tensor | None, named: bool = False) -> list[str]:
        """The reasons why it cannot compute on these tensors; none if it can. `named`: chosen by name."""

    @property
    def whole(self) -> Backend:
        """This backend, or the one whose kernels get tensors as they are."""
        return self

    def __repr__(self) -> str:
        return f"<the backend {self.name!r}>"

    def __reduce__(self) -> str:
        return self.name.upper()


class Reference(Backend):
    """The specification itself: plain torch on any device and dtype, differentiable again."""

    name = "reference"

    def why_not(self, *tensors: Tensor | None, named: bool = False) -> list[str]:
        return []


REFERENCE = Reference()
