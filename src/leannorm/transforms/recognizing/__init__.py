"""Which layers of unlisted classes compute a norm of ours? Those on which ours gives the same."""
