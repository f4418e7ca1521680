"""What happens to the others when one rank goes astray: real processes, each scenario a line of a table."""
