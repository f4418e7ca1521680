"""Published networks forked and folded: a sample here, `python -m benchmarks.program` and `.fold` for all."""

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import leannorm
from leannorm import program

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks import architectures
from benchmarks import program as comparison
from benchmarks.fold import randomized

needs_zoo = pytest.mark.skipif(
    find_spec("timm") is None or find_spec("torchvision") is None, reason="needs timm and torchvision"
)


@needs_zoo
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("architecture", architectures.SMALL, ids=lambda a: a.name)
def test_a_forked_network_is_the_network(architecture):
    model, image = architecture.build(), torch.rand(2, *architecture.image)
    forked = program.fork(model, (image,))
    assert not comparison.differences(model, forked, [image])


@needs_zoo
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", [None, "leannorm", "sync"])
@pytest.mark.parametrize("architecture", architectures.SMALL, ids=lambda a: a.name)
@pytest.mark.sampled(of=3)
def test_a_folded_network_is_the_network(architecture, way):
    """Of a converted one as many norms are folded as of stock's, which is all."""
    model = randomized(architecture.build())
    norms = sum(isinstance(m, torch.nn.modules.batchnorm._BatchNorm) for m in model.modules())
    if way is not None:
        model = leannorm.convert(model, to=way)
    report = leannorm.fold(model, (torch.randn(2, *architecture.image),))
    assert len(report.folded) == norms, report
    assert report.checked <= 1e4 * torch.finfo(torch.float64).eps * report.scale
