"""The library's main job on real data: stock layers and leannorm's, side by side on handwritten digits."""
