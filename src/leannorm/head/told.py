"""Reports which logits of a pass were computed, and for which operator."""

from __future__ import annotations

from collections.abc import Hashable

_UNFIT: dict[Hashable, set[tuple[int, int]]] = {}
_MAX_PLACES = 4096


class Told:
    """The layers that returned logits, and the operators for which some logits were computed.

    `place` identifies the line of the program that opens the pass: passes opened there run the same network.
    Heads are the layers whose logits a loss has read or, if there are none, the widest layer. Any other layer
    whose logits were computed is the first layer of an MLP: it is not reported, and later passes of this
    place run it normally.
    """

    def __init__(self, place: Hashable) -> None:
        self._place = place
        self._computed = dict[tuple[int, str], None]()
        self.deferred = set[tuple[int, int]]()  # as (outputs, inputs)
        self.read = set[int]()  # outputs of the layers whose logits a loss has read

    @property
    def unfit(self) -> set[tuple[int, int]]:
        return _UNFIT.get(self._place, set())

    def note(self, width: int, reason: str) -> None:
        """Record that the logits of a layer with `width` outputs were, or will be, computed."""
        self._computed[width, reason] = None

    def close(self) -> None:
        """End the pass, and remember the layers that turned out not to be heads."""
        computed = {width for width, _ in self._computed} - self._heads()
        found = {layer for layer in self.deferred if layer[0] in computed}
        if found:
            if len(_UNFIT) >= _MAX_PLACES:
                _UNFIT.clear()
            _UNFIT[self._place] = self.unfit | found

    def _heads(self) -> set[int]:
        widths = [outputs for outputs, _ in self.deferred] + [width for width, _ in self._computed]
        return self.read or {max(widths, default=0)}

    def reasons(self) -> list[str]:
        """A sentence for each operator that made a head compute its logits."""
        heads = self._heads()
        return [reason for width, reason in self._computed if width in heads]


def computed_for(reader: str, width: int) -> str:
    return (
        f"head=True: logits of {width} columns were computed, once, since {reader} needs them as a tensor;"
        " what follows of it is plain torch"
    )
