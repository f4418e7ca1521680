"""What does `lean()` save, and is training the same? On two common networks, and on handwritten digits."""
