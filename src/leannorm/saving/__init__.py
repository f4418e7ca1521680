"""Training in less memory: saved tensors are rebuilt in the backward pass instead of held."""
