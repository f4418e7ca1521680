"""`doctor` on the ranks of published models, under torch's own engine: nothing where nothing is wrong."""

import pytest
import torch
import torch.distributed as dist
from ranks import ranks
from test_lean_ranks_models import Decoder, cut
from torch.nn.parallel import DistributedDataParallel

import leannorm
from leannorm._catalog import norms_of
from leannorm.cli.models import model_named

pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed package"),
    pytest.mark.filterwarnings("ignore"),
]

LLAMA = "hf:llama,num_hidden_layers=2,hidden_size=64,intermediate_size=128,num_attention_heads=4"
LLAMA += ",num_key_value_heads=2,vocab_size=128"
SAMPLE = ("sequence", "decoder")
MORE = [
    ("ddp, sync", "timm:resnet18"),
    ("fsdp2", LLAMA),
    ("ddp", "timm:resnet18"),
    ("ddp", "timm:vit_tiny_patch16_224"),
    ("ddp", LLAMA),
    ("fsdp2", "timm:vit_tiny_patch16_224"),
    ("fsdp2", "timm:resnet18"),
    ("rows and columns", LLAMA),
    ("columns", "decoder"),
]


def _made(rank, kind, name):
    """The model of this rank, its batch, and what calls it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(0)
    model = Decoder() if name == "decoder" else model_named(name)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    seed = torch.Generator().manual_seed(rank if kind.startswith(("ddp", "fsdp2")) else 0)
    if name.startswith("timm"):
        side = 224 if "vit" in name else 64
        batch = torch.randn(4, 3, side, side, generator=seed)
    else:
        batch = torch.randint(0, 128, (4, 16), generator=seed)
    if name == "decoder":
        cut(model, mesh, kind)
    elif kind == "rows and columns":
        for block in model.model.layers:
            by = {f"self_attn.{n}_proj": ColwiseParallel() for n in "qkv"}
            by |= {f"mlp.{n}_proj": ColwiseParallel() for n in ("gate", "up")}
            by |= {n: RowwiseParallel() for n in ("self_attn.o_proj", "mlp.down_proj")}
            parallelize_module(block, mesh, by)
    elif kind == "fsdp2":
        for unit in [*(m for m in model.modules() if type(m).__name__.endswith(("Block", "Layer"))), model]:
            fully_shard(unit)
    else:
        if "sync" in kind:
            leannorm.convert(model, to="sync")
        model = DistributedDataParallel(model)
    return model, batch


def _values(parameter):
    return getattr(parameter, "_local_tensor", parameter).data


def eps(norm):
    name = "eps" if hasattr(norm, "eps") else "variance_epsilon"
    setattr(norm, name, 2 * getattr(norm, name))


def mode(norm):
    norm.eval()


def gamma(norm):
    _values(norm.weight).view(-1)[:1] += 1e-3


FAULTS = {None: None, eps: "rank_settings", mode: "rank_settings", gamma: "rank_weights"}


def _found(rank, kind, name):
    told = []
    for fault in FAULTS:
        model, batch = _made(rank, kind, name)
        norms = norms_of(model)
        layer = norms[len(norms) // 2]
        if fault and rank == 1:
            fault(layer.module)
        report = leannorm.doctor(model, batch)
        told.append((layer.name, [(one.check, one.layer) for one in report.findings]))
    return told


@pytest.mark.parametrize(
    ("kind", "name"), [SAMPLE, *(pytest.param(*one, marks=pytest.mark.conformance) for one in MORE)]
)
def test_published_models(kind, name):
    first, second = ranks(2, _found, kind, name)
    assert first == second
    missed = {}
    for (fault, check), (layer, found) in zip(FAULTS.items(), first, strict=True):
        shards = fault is gamma and kind == "fsdp2"  # each rank has its own part: there are no copies
        expected = [(check, layer)] if fault and not shards else []
        if [one for one in found if one[0] not in ("removed_bias", "half_frozen")] != expected:
            missed[fault and fault.__name__] = found
    assert missed == {}
