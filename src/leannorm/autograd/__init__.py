"""The norms as autograd functions: what each saves for the backward pass, and its backward pass."""
