"""Decides what to keep for the backward pass, in integers and seconds, for eager and compiled code."""
