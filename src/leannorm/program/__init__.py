"""How does one model become one graph that trains and infers?"""

from leannorm.program.forking import fork
from leannorm.program.program import Program

__all__ = ["Program", "fork"]
__dir__ = __all__.copy
