"""Published networks forked and folded: a sample here, `python -m benchmarks.program` and `.fold` for all."""

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import leannorm
from leannorm import program

sys.path.insert(0, str(Path(__file__).parent.parent))
from benchmarks import architectures
from benchmarks import program as comparison
from benchmarks.fold import randomized

CASES = {a.name: a for a in (*architectures.ARCHITECTURES, *architectures.SMALL)}
SAMPLE = ["torchvision:mobilenet_v3_small", *(a.name for a in architectures.SMALL)]
SWEEP = [pytest.param(name, marks=pytest.mark.conformance) for name in CASES if name not in SAMPLE]


@pytest.fixture(scope="module")
def zoo():
    """timm and torchvision; where the latter was built for another torch, its two operators are declared."""
    if find_spec("timm") is None or find_spec("torchvision") is None:
        pytest.skip("needs timm and torchvision")
    declared = torch.library.Library("torchvision", "FRAGMENT")
    try:
        import torchvision
    except RuntimeError:
        for name in ("nms", "qnms"):
            declared.define(f"{name}(Tensor boxes, Tensor scores, float threshold) -> Tensor")
        import torchvision
    return torchvision, declared


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [*SAMPLE, *SWEEP])
def test_a_forked_network_is_the_network(zoo, name):
    model, image = CASES[name].build(), torch.rand(2, *CASES[name].image)
    forked = program.fork(model, (image,))
    assert not comparison.differences(model, forked, [image])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [*SAMPLE, *SWEEP])
def test_a_folded_network_is_the_network(zoo, name):
    model = randomized(CASES[name].build()).eval()
    norms = sum(isinstance(m, torch.nn.modules.batchnorm._BatchNorm) for m in model.modules())
    image = torch.randn(2, *CASES[name].image)
    report = leannorm.fold(model, (image,))
    assert len(report.folded) + len(report.skipped) <= norms
    if name in SAMPLE:
        assert len(report.folded) == norms
        assert report.checked <= 1e4 * torch.finfo(torch.float64).eps * report.scale
