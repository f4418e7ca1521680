"""`doctor`: what is wrong with a model's norms; one file per kind of check, `checks.py` is their table."""
