"""One forward pass that is left alone, unless its first tensor shows that it is not the usual one."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from leannorm.saving import reasons, small, timing
from leannorm.saving.aside import PassHooks
from leannorm.saving.forward_pass import ForwardPass, Settings, refusal
from leannorm.saving.ledger import Ledger
from leannorm.saving.small import Alone, FirstTensor, nodes_made, unpack


def pass_at(settings: Settings, ledger: Ledger, line: Hashable) -> ForwardPass:
    """The pass that is opened at this line of the program."""
    if settings.may_be_small and (alone := small.left_alone(place := (line, settings.policy))) is not None:
        return LeftPass(place, alone, settings, ledger, line)
    return ForwardPass(settings, ledger, line)


class LeftPass(ForwardPass):
    """A pass that costs little, as its step is short. It becomes a usual ForwardPass if it is recorded."""

    def __init__(self, place: Hashable, alone: Alone, *given: Any) -> None:
        self._alone, self._at, self._given = alone, place, given
        self.ledger: Ledger = given[1]

    def open(self) -> None:
        """Set the hook, unless `refusal` gives a reason not to."""
        timing.opened()
        self._first: FirstTensor | None = None
        self.refused = refusal()
        if self.refused is not None:
            return
        self._first = FirstTensor(self._look_from_here, 0.0, self._alone.most)
        self._set = self._first.hooks = PassHooks(self._first.pack, unpack)
        self._set.__enter__()
        self._nodes = nodes_made()

    def _look_from_here(self) -> bool:
        first, hooks, nodes = self._first, self._set, self._nodes
        super().__init__(*self._given)
        self._following = None  # plans begin with the first tensor
        self._first, self._set, self._nodes = first, hooks, nodes
        return super()._look_from_here()

    def end(self, failed: bool) -> list[str]:
        """Remove the hook, if it is still set; returns why the pass was left alone."""
        first, alone = self._first, self._alone
        if first is None:
            return [] if self.refused is None else [self.refused]
        if first.is_other:
            return super().end(failed)
        assert self._set is not None
        self._set.__exit__(None, None, None)
        if alone.is_other(nodes_made() - self._nodes):
            small.note(self._at, None)
        if not first.kept:
            return self._nothing_saved()
        self.ledger.add(alone.seen.kept)
        return [reasons.SMALL]

    def _learn(self) -> None:
        """Have the next pass recorded, too."""
        small.note(self._at, None)
