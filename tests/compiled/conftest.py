import pytest

from leannorm.compiled import internals


@pytest.fixture(autouse=True)
def no_layout_is_changed(request, monkeypatch):
    """Graphs that are run node by node keep their layouts; inductor's code lays out convolutions."""
    if "inductor" not in request.keywords:
        monkeypatch.setattr(internals, "changes_layout", lambda module: False)
