"""What does it cost, is it right, what is wrong with a model? Data first, then text and HTML."""
