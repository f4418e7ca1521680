"""`convert` and back leaves what was there, whatever has made a class of the layer's or set hooks on it."""

import copy
import pickle
import re
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn as stock
from torch.nn.utils import parametrizations, parametrize, prune
from torch.nn.utils.weight_norm import remove_weight_norm, weight_norm

from leannorm import convert, nn
from leannorm._catalog import OURS
from leannorm.transforms import preview
from leannorm.transforms.converting.sync import synchronized_class
from leannorm.transforms.derived import beneath

pytestmark = pytest.mark.filterwarnings("ignore:convert left", "ignore:.*is deprecated", "ignore:.*will be")


class Sub(stock.BatchNorm2d):
    def forward(self, input):
        return super().forward(input) * 2


class ByItself(stock.BatchNorm2d):
    def forward(self, input):
        return input * self.weight[:, None, None]


def observed(layer):
    """As torch.ao's quantization prepares it for calibration: an observer in a hook."""
    from torch.ao import quantization

    layer.qconfig = quantization.default_qconfig
    quantization.add_quant_dequant(layer)
    quantization.prepare(layer.eval(), inplace=True, allow_list={type(layer)})
    return layer.train()


WRAPPED = {
    "plain": lambda layer: layer,
    "parametrization": lambda layer: parametrize.register_parametrization(layer, "weight", stock.Softplus()),
    "weight_norm": lambda layer: parametrizations.weight_norm(layer, "weight", dim=None),
    "weight_norm by hooks": lambda layer: weight_norm(layer, "weight", dim=None),
    "spectral_norm": lambda layer: parametrizations.spectral_norm(layer, "weight"),
    "pruned": lambda layer: prune.l1_unstructured(layer, "weight", 2),
    "observed": observed,
}
REMOVED = {
    "weight_norm by hooks": lambda layer: remove_weight_norm(layer, "weight"),
    "pruned": lambda layer: prune.remove(layer, "weight"),
}
COPIED = {
    "itself": lambda layer: layer,
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda layer: pickle.loads(pickle.dumps(layer)),
}
LAYERS = {
    "batch": lambda: stock.BatchNorm2d(4),
    "subclass": lambda: Sub(4),
    "layer": lambda: stock.LayerNorm(4),
}


def look(layer):
    """Types, attributes and hooks, of the layer and of what is in it."""
    return [
        (name, type(m), sorted(vars(m)), [len(v) for k, v in vars(m).items() if k.endswith("_hooks")])
        for name, m in layer.named_modules()
    ]


def remove(wrapped, layer):
    if wrapped in REMOVED:
        REMOVED[wrapped](layer)
    elif parametrize.is_parametrized(layer):
        parametrize.remove_parametrizations(layer, "weight")


@torch.no_grad()  # so that torch can copy what its hooks make of a weight
@pytest.mark.parametrize("copied", COPIED)
@pytest.mark.parametrize("to", ["leannorm", "sync"])
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("wrapped", WRAPPED)
def test_there_and_back(wrapped, layer, to, copied):
    made = LAYERS[layer]()
    kind = type(made)
    made = WRAPPED[wrapped](made)
    before, x = look(made), torch.randn(3, 4, 4, 4)
    want = made.eval()(x)
    try:
        COPIED[copied](made)
    except (AttributeError, RuntimeError) as error:  # as of parametrized layers
        refused = error
    else:
        refused = None
    convert(made.train(), to=to)
    if refused is not None:
        with pytest.raises(type(refused), match=re.escape(str(refused)[:20])):
            COPIED[copied](made)
        return
    if to == "sync" and layer != "layer":
        target = synchronized_class(OURS.get(kind, kind))
    else:
        target = OURS.get(kind, kind) if to == "leannorm" else kind
    twin = COPIED[copied](made)
    assert beneath(type(made)) is beneath(type(twin)) is target
    torch.testing.assert_close(twin.eval()(x), want)
    convert(twin.train(), to="torch")
    assert look(twin) == before
    assert torch.equal(twin.eval()(x), want)
    assert (beneath(type(made)) is target) == (copied != "itself" or target is kind)
    remove(wrapped, twin.train())
    assert type(twin) is kind


@torch.no_grad()
@pytest.mark.parametrize("wrapped", [name for name in WRAPPED if name != "observed"])
@pytest.mark.parametrize("to", ["leannorm", "sync"])
def test_a_wrapper_goes_while_it_is_converted_and_comes(wrapped, to):
    """A wrapper that is removed stays removed; one that was put around ours stays."""
    layer = WRAPPED[wrapped](stock.BatchNorm2d(4))
    convert(layer, to=to)
    ours = beneath(type(layer))
    remove(wrapped, layer)
    assert type(layer) is ours
    WRAPPED[wrapped](layer)
    convert(layer, to="torch")
    assert beneath(type(layer)) is stock.BatchNorm2d
    copy.deepcopy(layer)
    remove(wrapped, layer)
    assert type(layer) is stock.BatchNorm2d
    assert not any(name.startswith("_swapped") for name in vars(layer))


def test_a_second_parametrization_while_it_shares():
    layer = parametrize.register_parametrization(stock.BatchNorm2d(4), "weight", stock.Softplus())
    convert(layer, to="sync")
    parametrize.register_parametrization(layer, "bias", stock.Softplus())
    convert(layer, to="torch")
    parametrize.remove_parametrizations(layer, "weight")
    parametrize.remove_parametrizations(layer, "bias")
    assert type(layer) is stock.BatchNorm2d
    assert {"weight", "bias"} <= set(layer._parameters)


def test_sharing_ends_under_a_parametrization():
    layer = convert(stock.BatchNorm2d(4), to="sync")
    parametrize.register_parametrization(layer, "weight", stock.Softplus())
    assert layer.shares
    convert(layer)
    assert beneath(type(layer)) is nn.BatchNorm2d
    assert not layer.shares
    assert "process_group" not in vars(layer)


def test_what_computes_by_itself_does_not_share_under_a_parametrization():
    layer = parametrize.register_parametrization(ByItself(4), "weight", stock.Softplus())
    with pytest.warns(UserWarning, match="computes its norm by itself"):
        convert(layer, to="sync")
    assert beneath(type(layer)) is ByItself


def test_preview_names_the_layer_under_a_parametrization():
    layer = parametrize.register_parametrization(stock.BatchNorm2d(4), "weight", stock.Softplus())
    kind = type(layer)
    assert str(preview(layer)).endswith("-> leannorm.nn.ParametrizedBatchNorm2d")
    assert type(layer) is kind


def test_a_layer_of_ours_that_shares_is_left_as_it_is():
    layer = nn.SyncBatchNorm(4)
    before = look(layer)
    assert look(convert(convert(layer, to="sync"))) == before


@pytest.fixture
def wrappers(tmp_path):
    if not dist.is_available():
        pytest.skip("this torch has no distributed package")
    from torch.distributed._composable.replicate import replicate
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    yield {"fully_shard": partial(fully_shard, mesh=mesh), "replicate": replicate}
    dist.destroy_process_group()


@pytest.mark.parametrize("to", ["leannorm", "sync"])
@pytest.mark.parametrize("wrapped", ["fully_shard", "replicate"])
def test_there_and_back_of_ranks(wrapped, to, wrappers):
    layer = wrappers[wrapped](stock.BatchNorm2d(4))
    x = torch.randn(3, 4, 4, 4)
    kind, want, before = type(layer), layer.eval()(x), look(layer.eval())
    convert(layer.train(), to=to)
    assert type(layer).__bases__[0] is kind.__bases__[0]
    assert type(layer).__name__.startswith(kind.__name__.removesuffix("BatchNorm2d"))
    assert beneath(type(layer)).__module__.startswith("leannorm.")
    torch.testing.assert_close(layer.eval()(x), want)
    assert look(convert(layer.train(), to="torch")) == before
    assert type(layer) is kind


@pytest.mark.parametrize("wrapped", ["fully_shard", "replicate"])
def test_what_ranks_have_put_around_ours_stays(wrapped, wrappers):
    layer = wrappers[wrapped](convert(stock.BatchNorm2d(4), to="sync"))
    kind = type(layer)
    convert(layer)
    assert (type(layer).__bases__[0], type(layer).__bases__[1]) == (kind.__bases__[0], nn.BatchNorm2d)
    convert(layer, to="torch")
    assert (type(layer).__bases__[0], type(layer).__bases__[1]) == (kind.__bases__[0], stock.BatchNorm2d)
