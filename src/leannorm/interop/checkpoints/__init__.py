"""How do other frameworks keep parameters and statistics? Their conventions, and their files."""
