"""What does `lean()` save, and is the training the same? On two usual networks, and on handwritten digits."""
