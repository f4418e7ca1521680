"""How do other frameworks store parameters and statistics? Their conventions, and their files."""
