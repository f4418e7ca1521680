"""How does a language model's loss come about without its logits?

`lean(head=True)` opens a `Heads` (`defer.py`): a large linear layer gives `Logits` (`logits.py`), which know
what they would be computed from (`formula.py`). Losses, log-probabilities and entropies (`readers.py`) take
what they need of them from one function that computes them some columns at a time (`columns.py`). Views,
casts, scales and sums of logits are logits again (`forms.py`). Everything else gets the tensor, and `told.py`
says so.
"""

from __future__ import annotations

from leannorm.head.defer import Heads
from leannorm.head.told import Told

__all__ = ["Heads", "Told"]
