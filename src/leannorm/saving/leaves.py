"""Does a leaf still hold what a node of this pass read of it? By its contents at the start of the pass."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from typing import Any, ClassVar

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from leannorm.saving.device import asynchronous
from leannorm.saving.evidence import matches, sample_of
from leannorm.saving.provenance import Provenance

_MAX_PLACES = 4096


class Leaves:
    """The leaves that steps read, and their contents when a forward pass began.

    If a leaf has not changed since, every node made in this pass read what the leaf holds now. A node made
    before the pass (a cast that autocast or the user keeps) may have read something else.
    """

    _asked_at: ClassVar[dict[Hashable, WeakIdKeyDictionary]] = {}  # by the place where the pass opens
    _lock = threading.Lock()  # passes may run in several threads

    def __init__(self, provenance: Provenance) -> None:
        self._provenance = provenance
        self.before: dict[int, tuple[Tensor, int, bytes | None]] = {}
        self._of_this_place = WeakIdKeyDictionary()

    def begin(self, place: Hashable) -> None:
        """Sample the leaves that passes at this place have asked for."""
        with self._lock:
            if len(self._asked_at) > _MAX_PLACES:
                self._asked_at.clear()
            self._of_this_place = self._asked_at.setdefault(place, self._of_this_place)
            leaves = list(self._of_this_place)
        self.before = {id(leaf): (leaf, leaf._version, sample_of(leaf)) for leaf in leaves}

    def proves(self, node: Any, leaf: Tensor) -> bool:
        """Did the node read what the leaf holds now?"""
        if id(leaf) in self.before:
            _, version, sample = self.before[id(leaf)]
            unchanged = leaf._version == version and matches(sample, leaf)
            return unchanged and self._provenance.made(node)
        with self._lock:
            self._of_this_place[leaf] = None  # sampled from the next pass on
        return leaf._version == 0 and asynchronous(leaf)  # never edited; a sample would stall the step

    def forget(self) -> None:
        """Drop what was recorded when the pass began: the pass is over."""
        self.before.clear()
