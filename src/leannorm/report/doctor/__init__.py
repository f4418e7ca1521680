"""What is wrong with a model's norms? One file per kind of check, `checks.py` is their table."""
