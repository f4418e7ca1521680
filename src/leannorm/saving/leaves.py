"""Does a leaf still hold what a node of this pass read of it? By its contents at the start of the pass."""

from __future__ import annotations

import threading
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from leannorm.saving.device import asynchronous
from leannorm.saving.evidence import matches, sample_of
from leannorm.saving.provenance import Provenance


class Leaves:
    """The leaves that steps read, and their contents when a forward pass began.

    If a leaf has not changed since, every node made in this pass read what the leaf holds now. A node made
    before the pass (a cast that autocast or the user keeps) may have read something else.
    """

    _known: WeakIdKeyDictionary = WeakIdKeyDictionary()
    _lock = threading.Lock()  # passes may run in several threads

    def __init__(self, provenance: Provenance) -> None:
        self._provenance = provenance
        with self._lock:
            leaves = list(self._known)
        self.before = {id(leaf): (leaf, leaf._version, sample_of(leaf)) for leaf in leaves}

    def proves(self, node: Any, leaf: Tensor) -> bool:
        """Did the node read what the leaf holds now?"""
        if id(leaf) in self.before:
            _, version, sample = self.before[id(leaf)]
            unchanged = leaf._version == version and matches(sample, leaf)
            return unchanged and self._provenance.made(node)
        with self._lock:
            self._known[leaf] = None  # sampled from the next pass on
        return leaf._version == 0 and asynchronous(leaf)  # never edited; a sample would stall the step

    def forget(self) -> None:
        """Drop what was recorded when the pass began: the pass is over."""
        self.before.clear()
