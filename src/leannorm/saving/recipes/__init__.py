"""The recipes, by kind; importing this package registers them all."""

from leannorm.saving.recipes import (  # noqa: F401
    activations,
    arithmetic,
    attention,
    functions,
    norms,
    products,
    resampled,
    selected,
    shards,
    views,
    written,
)
from leannorm.saving.recipes.registry import RECIPES as RECIPES
