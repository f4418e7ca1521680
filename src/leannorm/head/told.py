"""What became of the logits of one pass, in words."""

from __future__ import annotations

from collections.abc import Hashable

_UNFIT: dict[Hashable, set[tuple[int, int]]] = {}
_MAX_PLACES = 4096


class Told:
    """Which layers gave logits, and what made some of them be computed. `place`: of the program, which opens
    passes of one network there.

    Heads are the layers whose logits a loss has read; if there is none, the widest. Another one whose logits
    were computed is the first of an MLP: nothing is said of it, and later passes here leave it alone.
    """

    def __init__(self, place: Hashable) -> None:
        self._place = place
        self._computed = dict[tuple[int, str], None]()
        self.deferred = set[tuple[int, int]]()  # as (outputs, inputs)
        self.read = set[int]()  # their outputs, where a loss has read them

    @property
    def unfit(self) -> set[tuple[int, int]]:
        return _UNFIT.get(self._place, set())

    def note(self, width: int, reason: str) -> None:
        """The logits of a layer of so many outputs were computed, or are to be."""
        self._computed[width, reason] = None

    def close(self) -> None:
        """The pass has ended: remember the layers that were no heads."""
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
        """Why the head's logits were computed, if they were."""
        heads = self._heads()
        return [reason for width, reason in self._computed if width in heads]


def computed_for(reader: str, width: int) -> str:
    return (
        f"head=True: logits of {width} columns were computed, once, since {reader} needs them as a tensor;"
        " what follows of it is plain torch"
    )
