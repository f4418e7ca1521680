"""How is a language model's loss computed without its logits?

`lean(head=True)` opens a `Heads` (`defer.py`): a large linear layer returns `Logits` (`logits.py`), which
store what they would be computed from (`formula.py`). Losses, log-probabilities and entropies (`readers.py`)
call one function that computes logits a block of columns at a time (`columns.py`). Views, casts, scales and
sums of logits are logits again (`forms.py`). Every other operator gets the computed tensor, and `told.py`
reports which one it was.
"""

from __future__ import annotations

from leannorm.head.defer import Heads
from leannorm.head.told import Told

__all__ = ["Heads", "Told"]
