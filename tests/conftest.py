"""What every test shares: a fixed seed, few threads, warnings as errors (pyproject), poisoned memory."""

import pytest
import torch


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def poisoned_memory():
    """`torch.empty` is filled with NaN, so that an output that nobody wrote shows."""
    flags = torch.utils.deterministic
    before = flags.fill_uninitialized_memory, torch.are_deterministic_algorithms_enabled()
    flags.fill_uninitialized_memory = True
    yield
    flags.fill_uninitialized_memory = before[0]
