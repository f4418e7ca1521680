"""`stats_dtype=`: running statistics keep their dtype, and every bit, whatever the layer is cast to."""

import copy
import io
import pickle

import pytest
import torch
from ranks import ranks
from torch import nn as stock

import leannorm
from benchmarks.architectures import import_torchvision
from leannorm import nn

F32, BF16 = torch.float32, torch.bfloat16
LAYERS = {
    "BatchNorm1d": lambda **of: nn.BatchNorm1d(3, **of),
    "BatchNorm2d": lambda **of: nn.BatchNorm2d(3, **of),
    "BatchNorm3d": lambda **of: nn.BatchNorm3d(3, **of),
    "BatchNormAct2d": lambda **of: nn.BatchNormAct2d(3, **of),
    "SyncBatchNorm": lambda **of: nn.SyncBatchNorm(3, **of),
    "ConvBatchNorm2d": lambda **of: nn.ConvBatchNorm2d(2, 3, 1, **of),
    "InstanceNorm2d": lambda **of: nn.InstanceNorm2d(3, affine=True, track_running_stats=True, **of),
    "BatchNormOp": lambda **of: nn.BatchNormOp(3, **of),
}


def statistics(layer):
    return [b for k, b in layer.named_buffers() if "mean" in k or "var" in k]


def odd(layer):
    """Statistics that bfloat16 does not hold."""
    with torch.no_grad():
        for value in statistics(layer):
            value.uniform_(1, 2)
    return [v.clone() for v in statistics(layer)]


def assert_kept(layer, want, dtype=F32):
    for got, value in zip(statistics(layer), want, strict=True):
        assert got.dtype is dtype
        assert torch.equal(got, value)


CASTS = {
    "half": lambda m: m.half(),
    "bfloat16": lambda m: m.bfloat16(),
    "double": lambda m: m.double(),
    "to": lambda m: m.to(BF16),
    "to a device too": lambda m: m.to("cpu", BF16, non_blocking=True),
    "to as a tensor": lambda m: m.to(torch.zeros(1, dtype=BF16)),
    "there and back": lambda m: m.half().float(),
    "in a model": lambda m: stock.Sequential(m).bfloat16()[0],
    "copied": lambda m: copy.deepcopy(m).bfloat16(),
    "pickled": lambda m: pickle.loads(pickle.dumps(m)).half(),
}


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("name", LAYERS)
def test_casts(name, cast):
    layer = LAYERS[name](stats_dtype=F32)
    want = odd(layer)
    layer = CASTS[cast](layer)
    assert_kept(layer, want)
    assert next(layer.parameters()).dtype == {"double": torch.float64, "there and back": F32}.get(
        cast, torch.float16 if cast in ("half", "pickled") else BF16
    )
    assert "stats_dtype=torch.float32" in repr(layer)


@pytest.mark.parametrize("name", LAYERS)
def test_without_it_all_is_torchs(name):
    layer = LAYERS[name]()
    assert {v.dtype for v in statistics(layer.bfloat16())} == {BF16}
    assert "stats_dtype" not in repr(layer)
    with pytest.raises(
        leannorm.InputError, match=r"stats_dtype must be a floating dtype or None, got torch\.int64"
    ):
        LAYERS[name](stats_dtype=torch.int64)


@pytest.mark.parametrize("name", LAYERS)
def test_made_in_another_dtype_and_on_meta(name):
    layer = LAYERS[name](dtype=BF16, stats_dtype=F32)
    assert {v.dtype for v in statistics(layer)} == {F32}
    assert {p.dtype for p in layer.parameters()} == {BF16}
    layer = LAYERS[name](device="meta", stats_dtype=F32).bfloat16().to_empty(device="cpu")
    assert {v.dtype for v in statistics(layer)} == {F32}
    before = torch.get_default_dtype()
    torch.set_default_dtype(BF16)  # as transformers does for its dtype=
    try:
        assert {v.dtype for v in statistics(LAYERS[name](stats_dtype=F32))} == {F32}
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_state_dicts_load_either_way(name, assign):
    wide, plain = LAYERS[name](stats_dtype=F32).bfloat16(), LAYERS[name]().bfloat16()
    odd(wide), odd(plain)
    assert list(wide.state_dict()) == list(plain.state_dict())
    want = [v.float() for v in statistics(plain)]
    wide.load_state_dict(plain.state_dict(), assign=assign)
    assert_kept(wide, want)
    odd(wide)
    plain.load_state_dict(wide.state_dict())
    assert_kept(plain, [v.to(BF16) for v in statistics(wide)], BF16)
    file = io.BytesIO()
    torch.save(wide.state_dict(), file)
    file.seek(0)
    other = LAYERS[name](stats_dtype=F32)
    other.load_state_dict(torch.load(file))
    assert_kept(other, statistics(wide))


def test_a_mean_of_100_is_learned():
    x = torch.randn(64, 3, 4, 4) + 100
    wide, plain = nn.BatchNorm2d(3, stats_dtype=F32).bfloat16(), nn.BatchNorm2d(3).bfloat16()
    for _ in range(150):
        wide(x.to(BF16)), plain(x.to(BF16))
    assert (wide.running_mean - 100).abs().max() < 0.1
    assert (plain.running_mean - 100).abs().max() > 1


class Casts(stock.Module):
    """Casts the buffers' data, as FSDP's mixed precision does."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer
        for buffer in statistics(layer):
            buffer.data = buffer.to(BF16)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", LAYERS)
def test_what_was_cast_behind_its_back(name, training):
    layer = LAYERS[name](stats_dtype=F32).train(training)
    Casts(layer)
    shape = {"BatchNorm1d": (4, 3), "BatchNorm3d": (4, 3, 2, 2, 2), "ConvBatchNorm2d": (4, 2, 3, 3)}
    layer(torch.randn(shape.get(name, (4, 3, 3, 3))))
    assert {v.dtype for v in statistics(layer)} == {F32}


def sharded(rank):
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision

    model = stock.Sequential(stock.Linear(4, 3), nn.BatchNorm1d(3, stats_dtype=F32), stock.Linear(3, 2))
    mixed = MixedPrecision(param_dtype=BF16, buffer_dtype=BF16, _module_classes_to_ignore=())
    model = FullyShardedDataParallel(model, mixed_precision=mixed, device_id=torch.device("cpu"))
    for _ in range(3):
        model(torch.randn(8, 4)).sum().backward()
    layer = model.module[1]
    assert layer.num_batches_tracked == 3
    return [str(b.dtype) for b in layer.buffers()]


def test_fsdps_buffer_dtype():
    assert ranks(2, sharded) == [["torch.float32", "torch.float32", "torch.int64"]] * 2


def test_convert_sets_it():
    model = stock.Sequential(
        stock.BatchNorm2d(3), stock.InstanceNorm2d(3, track_running_stats=True), stock.LayerNorm(3)
    )
    want = odd(model)
    leannorm.convert(model, stats_dtype=F32).bfloat16()
    assert_kept(model, want)
    leannorm.convert(model, to="sync").half()
    assert_kept(model, want)
    leannorm.convert(model).half()
    assert_kept(model, want)
    leannorm.convert(model, to="torch")
    assert_kept(model, want)
    assert not any("stats_dtype" in vars(m) for m in model.modules())
    assert {v.dtype for v in statistics(model.half())} == {torch.float16}
    leannorm.convert(model, stats_dtype=F32)
    assert {v.dtype for v in statistics(model)} == {F32}
    with pytest.raises(leannorm.InputError, match='got to="torch"'):
        leannorm.convert(model, to="torch", stats_dtype=F32)
    with pytest.raises(leannorm.InputError, match="stats_dtype must be"):
        leannorm.convert(model, stats_dtype="float32")


def test_transformers_dtype(tmp_path):
    import_torchvision()
    from transformers import PretrainedConfig, PreTrainedModel

    class Model(PreTrainedModel):
        config_class = PretrainedConfig

        def __init__(self, config):
            super().__init__(config)
            self.bn = nn.BatchNorm2d(3, stats_dtype=F32)
            self.post_init()

        def _init_weights(self, module):
            pass

        def forward(self, x):
            return self.bn(x)

    model = Model(PretrainedConfig())
    odd(model)
    model.save_pretrained(tmp_path)
    loaded = Model.from_pretrained(tmp_path, dtype=BF16)
    assert loaded.bn.weight.dtype is BF16
    loaded(torch.randn(4, 3, 5, 5).to(BF16))
    assert {v.dtype for v in statistics(loaded)} == {F32}


def test_compiled_and_exported():
    layer, x = nn.BatchNorm2d(3, stats_dtype=F32).bfloat16(), torch.randn(4, 3, 5, 5).to(BF16)
    twin = copy.deepcopy(layer)
    torch.compile(layer, fullgraph=True, backend="aot_eager")(x), twin(x)
    for one, other in zip(layer.buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(one, other)
    torch.testing.assert_close(torch.export.export(layer.eval(), (x,)).module()(x), layer(x))
