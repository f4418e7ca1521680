"""What a step costs and how far a number is off: data first, text and HTML second."""
