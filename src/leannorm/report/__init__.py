"""Reports: memory and time of a training step, and the error of results. Data first, then text and HTML."""
