"""What a backend is: the verbs of both families, and which tensors it can serve."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from leannorm.ops.backends.reference import ChannelVerbs
from leannorm.ops.backends.reference_modulated import ModulatedVerbs
from leannorm.ops.sums import SumVerbs


class Backend(ChannelVerbs, ModulatedVerbs, SumVerbs, ABC):
    """One implementation of the verbs. Their meaning, in plain torch, is inherited; kernels replace it.

    Each backend has one instance, in its module under its name in capitals; pickle and copy return that one.
    """

    name: str
    launches = False  # is each operator a launch on a device?
    as_given = False  # are tensors handed to the kernels as they are (`ops/as_given.py`)?

    @abstractmethod
    def why_not(self, *tensors: Tensor | None, named: bool = False) -> list[str]:
        """The reasons why these tensors cannot be served: none, if they can. `named`: chosen by name."""

    @property
    def whole(self) -> Backend:
        """This backend, or the one whose kernels it hands tensors as they are given."""
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
