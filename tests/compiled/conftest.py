from contextlib import nullcontext

import pytest
from torch._inductor import config


@pytest.fixture(autouse=True)
def no_layout_is_changed(request):
    """Graphs that are run node by node keep their layouts, unless a test is of what inductor lays out."""
    lays_out = "lays_out" in request.keywords
    how = {"layout_optimization": lays_out, "force_layout_optimization": lays_out}
    with nullcontext() if "inductor" in request.keywords else config.patch(**how):
        yield
