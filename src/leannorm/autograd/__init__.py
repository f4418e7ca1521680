"""What each norm keeps for the backward pass, and how its gradient goes back."""
