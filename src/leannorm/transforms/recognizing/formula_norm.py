"""Layers of unlisted classes, computed by leannorm if their own code computes one of our norms.

A layer gets a subclass of its class. At every call the subclass checks whether everything is as in the run
that found the formula: the attributes that it read, its methods, dtypes and sizes. If so, leannorm computes
it; in every other case (further arguments, another dtype, a tensor subclass, an exported graph) the layer's
own code runs.
"""

from __future__ import annotations

import functools
import types
from typing import Any, cast

from torch.nn import Module

from leannorm.nn._layer import Layer
from leannorm.ops.modes import exporting
from leannorm.transforms.derived import covered, one_a_class, reduced
from leannorm.transforms.recognizing.form import UnknownFormError
from leannorm.transforms.recognizing.formula_call import Formula, compute
from leannorm.transforms.recognizing.recognition import formula_of


class FormulaNorm(Layer):
    """Comes before the layer's own class."""

    _has_name_of_another = True
    original: type[Module]
    _formula: Formula

    def _compute(self, args: Any, kwargs: Any) -> Any:
        """The layer's output, by its formula if that holds, otherwise by its own forward."""
        formula = self._formula
        inputs, layer = formula.inputs_of(args, kwargs), cast(Module, self)
        if inputs and not exporting() and formula.holds(layer, self.original):
            form_and_tensors = formula.find(layer, inputs)
            if form_and_tensors is not None:
                return compute(*form_and_tensors, *inputs)
        return self.original.forward(layer, *args, **kwargs)

    @property
    def function(self) -> str:
        """The name of the function of ours that computes this norm."""
        return next(iter(self._formula.fits.values())).form.function.__name__

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Without the formula, which is read again because the layer's code may be another one there."""
        again, of, state, *rest = reduced(formula_class, self.original, cast(Module, self))
        return again, of, {k: v for k, v in state.items() if k != "_formula"}, *rest

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[misc]
        self.read_again()

    def read_again(self) -> None:
        """Find the formula of a layer that was copied or loaded; without one it gets its class back."""
        try:
            vars(self)["_formula"] = formula_of(cast(Module, self), self.original)
        except UnknownFormError:
            vars(self).pop("_swapped", None)
            self.__class__ = covered(type(self), self.original)


@one_a_class
def formula_class(cls: type[Module]) -> type[Module]:
    """The subclass of `cls` that runs formulas. It has the same name, by which other code recognizes
    norms."""

    @functools.wraps(cls.forward)  # with its signature, which tracers read
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._compute(args, kwargs)

    body = {"__module__": __name__, "__doc__": cls.__doc__, "original": cls, "forward": forward}
    new = types.new_class(cls.__name__, (FormulaNorm, cls), exec_body=lambda names: names.update(body))
    new.__qualname__ = cls.__qualname__
    return new
