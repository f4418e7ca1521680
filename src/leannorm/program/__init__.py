"""How does one model become one graph that trains and infers?"""

from leannorm.program.forking import fork as fork
from leannorm.program.program import Program as Program

__all__ = ["Program", "fork"]
