"""How does compiled code keep less? `compile_options()`: a plan for the compiler's own partition."""

from leannorm.compiled.options import CompileOptions as CompileOptions
from leannorm.compiled.options import compile_options as compile_options
