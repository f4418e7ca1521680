"""Training in less memory: saved tensors are rebuilt in the backward pass instead of kept."""

from leannorm.saving.context import lean as lean
from leannorm.saving.models import make_lean as make_lean
from leannorm.saving.models import unmake_lean as unmake_lean
