"""What a plan may keep instead of a larger tensor that is made of it, although no node saves it.

A concatenation is made of parts, an upsampled image of a smaller one, a log-softmax of a cast. If the larger
tensor is dropped, these are rebuilt with it, or kept: in a DenseNet all layers share the parts.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from leannorm.saving.timeline import Timeline

Readers = list[tuple[int, int]]  # values made of a piece, and the piece's position among their sources


class Pieces:
    """The pieces of one pass. `narrows`: whether a cast may be kept in its source's dtype."""

    def __init__(self, timeline: Timeline, narrows: bool) -> None:
        self._timeline, self._narrows = timeline, narrows
        self._saved_at = dict[int, int]()
        for _, i, call in timeline.saves:
            self._saved_at[i] = min(self._saved_at.get(i, call), call)
        readers = defaultdict[int, Readers](list)
        for i, value in enumerate(timeline.values):
            for position, source in enumerate(value.inputs if value.makes else []):
                readers[source].append((i, position))
        self.readers = {i: users for i, users in readers.items() if self._is_piece(i, users)}

    def _is_piece(self, i: int, users: Readers) -> bool:
        values = self._timeline.values
        if not values[i].makes or i in self._saved_at:
            return False
        if any(values[user].follows == i or not self._is_kept_with(i, user) for user, _ in users):
            return False
        return self.nbytes(i) < sum(values[user].coded for user, _ in users)

    def _is_kept_with(self, i: int, user: int) -> bool:
        """Whether the piece is there when a node first saves this value, or can be copied out of it."""
        if user not in self._saved_at:
            return False
        value, of = self._timeline.values[i], self._timeline
        is_part = of.name_of(of.values[user]) == "aten::cat" and value.nbytes == value.storage
        return is_part or of.until[value.memory] >= self._saved_at[user]

    def nbytes(self, i: int) -> int:
        """The bytes that it takes."""
        value, of = self._timeline.values[i], self._timeline
        is_cast = self._narrows and of.name_of(value) == "aten::_to_copy"
        return min(value.coded, of.calls[value.call].reads[0].nbytes) if is_cast else value.coded

    def kept_from(self, i: int, freed: int) -> int:
        """The moment from which it takes memory of its own. A copy in its source's dtype does at once, any
        other piece once the program has `freed` it."""
        is_copy = self.nbytes(i) < self._timeline.values[i].storage
        return self._timeline.values[self.readers[i][0][0]].call if is_copy else freed
