"""The recipes, by kind; importing this room registers them all."""

from leannorm.saving.recipes import activations, arithmetic, norms, own, products, views  # noqa: F401
from leannorm.saving.recipes.registry import RECIPES as RECIPES
