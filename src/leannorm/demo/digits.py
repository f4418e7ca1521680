"""Real handwritten digits as tensors: scikit-learn's bundled 1,797 images, or torchvision's MNIST."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from leannorm._errors import InputError, MissingDependencyError

SIZE = 28


class Digits(NamedTuple):
    """Images (N, 1, 28, 28), float32 of mean 0 and variance 1 over the training images; labels 0 to 9."""

    name: str
    images: Tensor
    labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def load(data: str = "digits", root: str | None = None) -> Digits:
    """`digits`: scikit-learn's, needs no download. `mnist`: torchvision's, from `root` or downloaded to it.

    Raises MissingDependencyError where the library is not installed; InputError for an unknown name, a root
    that is not given, and files that can neither be read nor downloaded.
    """
    if data == "digits":
        return _scaled("scikit-learn digits", *_sklearn_digits())
    if data == "mnist":
        return _scaled("MNIST", *_mnist(root))
    raise InputError(f"unknown data {data!r}: choose digits or mnist")


def _scaled(name: str, images: Tensor, labels: Tensor, test_images: Tensor, test_labels: Tensor) -> Digits:
    std, mean = torch.std_mean(images)
    return Digits(name, (images - mean) / std, labels, (test_images - mean) / std, test_labels)


def _sklearn_digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    try:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    except ImportError:
        raise MissingDependencyError(
            "the digits come with scikit-learn, which is not installed: pip install 'leannorm[demo]'"
        ) from None
    bundled = load_digits()
    split = train_test_split(
        bundled.images, bundled.target, test_size=0.2, random_state=0, stratify=bundled.target
    )
    images, test_images, labels, test_labels = (torch.from_numpy(part) for part in split)
    return _resized(images), labels, _resized(test_images), test_labels


def _resized(images: Tensor) -> Tensor:
    """8×8 to the network's 28×28."""
    return F.interpolate(images.float().unsqueeze(1), (SIZE, SIZE), mode="bilinear")


def _mnist(root: str | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if root is None:
        raise InputError("mnist needs a folder for its files: add --root DIR")
    try:
        from torchvision.datasets import MNIST
    except (ImportError, RuntimeError):  # built for another torch, torchvision fails on its own operators
        raise MissingDependencyError(
            "mnist comes with torchvision, which is not installed or not built for this torch: "
            "install torchvision, or use --data digits"
        ) from None
    try:
        parts = [MNIST(root, train=train, download=True) for train in (True, False)]
    except (OSError, RuntimeError, ValueError, AssertionError) as error:  # a truncated file raises any
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(
            f"the MNIST files could be neither read from {root!r} nor downloaded ({reason}): "
            "put them there, or use --data digits"
        ) from None
    train, test = ((part.data.float().unsqueeze(1), part.targets) for part in parts)
    return *train, *test
