"""A demo on real data: a network trained with stock layers and with leannorm's on handwritten digits."""
