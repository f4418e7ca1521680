"""What every test shares: a fixed seed, one thread, warnings as errors (pyproject), poisoned memory."""

import os
import sys

# torch's own sums, and with them its errors, which are the measure of ours, depend on the number of threads;
# read when torch is imported, here and in the processes that tests start
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["LEANNORM_POISON"] = "1"  # the C++ kernels' results are filled with NaN, as torch's are below

import pytest
import torch
from sampling import leave_samples

# read when the kernels are decorated: without a GPU they are interpreted
os.environ.setdefault("TRITON_INTERPRET", str(int(not torch.cuda.is_available())))

# torch's own table of tests calls it when it is imported; programs of later tests set flags
torch.backends.disable_global_flags = lambda: None


@pytest.hookimpl(tryfirst=True)  # before pytest looks at the marks
def pytest_collection_modifyitems(config, items):
    asked_for = config.getoption("lf", False) or any("[" in named for named in config.args)
    if not asked_for:
        leave_samples(items)


@pytest.fixture(autouse=True)
def seed():
    torch.default_generator.manual_seed(0)  # torch.manual_seed notes its caller for each kind of device
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(0)


@pytest.fixture(autouse=True)
def poisoned_memory():
    """`torch.empty` is filled with NaN, so that an output that nobody wrote shows."""
    torch.use_deterministic_algorithms(True)  # torch fills only then
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def nothing_of_another_test():
    """A network that begins as an earlier one did would follow that one's plan first."""
    from leannorm.saving.remembered import nothing_remembered

    with nothing_remembered():
        yield


@pytest.fixture(autouse=True)
def prices_of_the_table(monkeypatch):
    """Rates are measured in the tests that are about them."""
    monkeypatch.setenv("LEANNORM_RATES", "")


@pytest.fixture(autouse=True)
def no_step_is_measured(request, monkeypatch):
    """A plan for an overhead would depend on what else the machine does; tests of that are marked."""
    if not request.node.get_closest_marker("steps_are_measured"):
        monkeypatch.setattr("leannorm.saving.watched.watch_of", lambda place: None)


@pytest.fixture(autouse=True)
def no_pass_is_small(monkeypatch):
    """What tests train is small, and `lean()` would leave it as it is from the second pass on."""
    monkeypatch.setenv("LEANNORM_SMALL_BYTES", "-1")


@pytest.fixture(autouse=True)
def nothing_compiled_before():
    """torch compiles one forward a few times only; layers share theirs, and tests share a process."""
    yield
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


@pytest.fixture(params=["nodes", "python"])
def with_and_without_nodes(request, monkeypatch):
    """Are the C++ nodes there? They tell more; without them other evidence has to do."""
    from lean_cases import without_nodes

    from leannorm.autograd import nodes

    if request.param == "python":
        without_nodes(monkeypatch)
    elif nodes.NODES is None:
        pytest.skip("the C++ nodes are not built")
    return request.param == "nodes"
