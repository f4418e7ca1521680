"""The recipes, by kind; importing this room registers them all."""

from leannorm.saving.recipes import activations, arithmetic, functions, norms, products, views  # noqa: F401
from leannorm.saving.recipes.registry import RECIPES as RECIPES
