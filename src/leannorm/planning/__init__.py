"""What to keep for the backward pass: one planner, of integers and seconds, for eager and compiled code."""
