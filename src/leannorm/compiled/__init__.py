"""`compile_options()`: compiled code that holds less, by a plan for the compiler's partition."""

from leannorm.compiled.options import CompileOptions as CompileOptions
from leannorm.compiled.options import compile_options as compile_options
