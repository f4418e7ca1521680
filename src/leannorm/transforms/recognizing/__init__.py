"""Which layers of unlisted classes compute a norm of ours? Read from one run of a probe."""
