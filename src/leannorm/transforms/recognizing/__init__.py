"""Which layers of unlisted classes compute one of our norms? Those for which ours gives the same results."""
