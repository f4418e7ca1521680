"""Published networks train under `lean()` to the same bits as without: outputs, gradients, buffers.

A sample on every run; all of timm's and torchvision's with `-m conformance` (`make conformance`).
"""

from __future__ import annotations

import contextlib
import inspect

import pytest
import torch
from torch import Tensor, nn

from benchmarks.architectures import import_torchvision
from leannorm.saving import lean

SAMPLE = (
    "timm:test_resnet",
    "timm:test_efficientnet",
    "timm:test_vit",
    "timm:test_convnext",
    "timm:mobilenetv3_small_050",
    "timm:ghostnet_050",
    "timm:convnext_atto",
    "timm:resnetv2_50x1_bit",
    "timm:poolformer_s12",
    "timm:levit_128s",
    "torchvision:shufflenet_v2_x0_5",
    "torchvision:squeezenet1_1",
)
MOST_PARAMETERS = 40_000_000
SIZES = (64, 96, 224)


import_torchvision()  # timm needs it too
pytest.importorskip("timm", reason="published networks come from timm, which is not installed")


def everything() -> list[str]:
    import timm
    from torchvision.models import list_models

    vision = list_models(exclude=["*rcnn*", "*ssd*", "*retinanet*", "*fcos*", "quantized*", "raft*"])
    return [*(f"timm:{n}" for n in timm.list_models()), *(f"torchvision:{n}" for n in vision)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "architecture" in metafunc.fixturenames:
        whole = metafunc.config.getoption("markexpr") == "conformance"
        marks = [pytest.mark.conformance] if whole else []  # what is marked, `make test` leaves out
        metafunc.parametrize(
            "architecture", [pytest.param(name, marks=marks) for name in (everything() if whole else SAMPLE)]
        )


def build(architecture: str, **options: object) -> nn.Module:
    library, name = architecture.split(":")
    torch.manual_seed(0)
    if library == "timm":
        import timm

        return timm.create_model(name, num_classes=10, **options)
    from torchvision.models import get_model, get_model_builder

    takes = inspect.signature(get_model_builder(name)).parameters
    none = {key: None for key in ("weights", "weights_backbone") if key in takes}  # by default it is fetched
    return get_model(name, **none, **options)


def parameters(architecture: str) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in build(architecture).parameters())


def prepared(architecture: str) -> tuple[nn.Module, Tensor]:
    """The network and the smallest images it takes; skips, with the reason, what does not train here."""
    try:
        count = parameters(architecture)
    except (RuntimeError, NotImplementedError, AttributeError, ValueError):
        count = 0  # not to be built without memory: try it
    if count > MOST_PARAMETERS:
        pytest.skip(f"{count / 1e6:.0f} million parameters")
    reason = "takes no image of the sizes tried"
    for size in SIZES:
        for options in ({"img_size": size}, {}):
            try:
                model = build(architecture, **options)
                x = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(0))
                with torch.no_grad():
                    model.eval()(x)
            except (AssertionError, RuntimeError, TypeError, ValueError, IndexError, KeyError) as error:
                reason = f"does not run: {str(error).splitlines()[0][:80] if str(error) else type(error)}"
                continue
            return model.train(), x
    pytest.skip(reason)


def trained(
    model: nn.Module, x: Tensor, context: contextlib.AbstractContextManager
) -> dict[str, Tensor | None]:
    """Output, gradients and buffers of one step, which is then undone."""
    state = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(1)
    x = x.clone().requires_grad_()
    with context:
        outputs = [y for y in _tensors(model(x)) if y.requires_grad]
        loss = sum(y.float().square().mean() for y in outputs)
    loss.backward()
    left = {f"output {i}": y.detach() for i, y in enumerate(outputs)}
    left |= {"input": x.grad, **{f"{n} gradient": p.grad for n, p in model.named_parameters()}}
    left |= {name: buffer.clone() for name, buffer in model.named_buffers()}
    for p in model.parameters():
        p.grad = None
    model.load_state_dict(state)
    return left


def _tensors(output: object) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    values = output.values() if isinstance(output, dict) else output
    return [t for v in values if v is not None for t in _tensors(v)]


def same(a: Tensor | None, b: Tensor | None) -> bool:
    """Bit for bit, where a NaN equals itself."""
    return a is b or (a is not None and b is not None and torch.equal(a.nan_to_num(), b.nan_to_num()))


@pytest.mark.sampled(of=3)
@pytest.mark.filterwarnings("ignore")  # the networks' own
def test_trains_to_the_same_bits(architecture: str) -> None:
    model, x = prepared(architecture)
    try:
        stock, again = (
            trained(model, x, contextlib.nullcontext()),
            trained(model, x, contextlib.nullcontext()),
        )
    except (RuntimeError, ValueError) as error:
        pytest.skip(f"does not train: {str(error).splitlines()[0][:80]}")
    if not all(same(v, again[k]) for k, v in stock.items()):
        pytest.skip("stock training itself does not repeat its bits")
    for setting in ({"recompute": "norm"}, {"recompute": "conv"}, {"budget": 0.3}):
        ours = trained(model, x, lean(**setting))
        assert ours.keys() == stock.keys()
        different = [name for name, value in stock.items() if not same(ours[name], value)]
        assert not different, f"{setting}: not equal bit for bit: {different[:5]} and {len(different)} in all"
