"""What `torch.export` makes of us: torch's own functions in evaluation, ours for a batch's statistics."""

import copy
import itertools
import subprocess
import sys

import pytest
import torch
from export_cases import IMAGE, Case, error_of, state
from torch import nn as stock

import leannorm
from leannorm import functional as F
from leannorm import nn
from leannorm.ops.activation import ACTIVATIONS

# torch's own, of what it calls itself
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*treespec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),
]
CLOSE = 1e-5
C = 6
SMALL = [
    Case("convolutional"),
    Case("convolutional", lean=True),
    Case("grouped"),
    Case("rows"),
    Case("rms"),
    Case("own"),
]


def operators(exported):
    """The names of all operators in a program, those in its inner graphs and those that others call too."""
    graphs = [m.graph for m in exported.graph_module.modules() if isinstance(m, torch.fx.GraphModule)]
    called = [v for graph in graphs for node in graph.nodes for v in (node.target, *node.args)]
    return [str(v) for v in called if isinstance(v, torch._ops.OpOverload)]


def ours(exported):
    return [name for name in operators(exported) if "leannorm" in name]


class Function(stock.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *inputs):
        return self.function(*inputs)


def image(**options):
    return torch.randn(4, C, 5, 8, **options)


MEAN, VAR, WEIGHT, BIAS = torch.randn(C), torch.rand(C) + 0.5, torch.rand(C) + 0.5, torch.randn(C)
STATE, LAST, KERNEL = (
    (MEAN, VAR, WEIGHT, BIAS),
    (torch.rand(8) + 0.5, torch.randn(8)),
    torch.randn(C, C, 3, 3),
)
IMAGES = (image, image)
last = {"memory_format": torch.channels_last}
FUNCTIONS = {
    **{
        f"batch_norm_act {a}": (lambda x, r, a=a: F.batch_norm_act(x, *STATE, act=a, residual=r), *IMAGES)
        for a in ACTIVATIONS
    },
    "batch_norm": (lambda x: F.batch_norm(x, MEAN, VAR, WEIGHT), image),
    "batch_norm of float64": (lambda x: F.batch_norm(x, *STATE), lambda: image().double()),
    "batch_norm of bfloat16": (lambda x: F.batch_norm(x, *STATE), lambda: image().bfloat16()),
    "sync_batch_norm": (lambda x: F.sync_batch_norm(x, *STATE), image),
    "batch_norm_op": (lambda x: F.batch_norm_op(x, *STATE, is_infer=True).y, image),
    "group_norm": (lambda x: F.group_norm(x, 3, WEIGHT, BIAS), image),
    "group_norm of channels_last": (lambda x: F.group_norm(x, 2), lambda: image().to(**last)),
    "instance_norm": (lambda x: F.instance_norm(x, None, None, WEIGHT, BIAS), image),
    "instance_norm by running": (lambda x: F.instance_norm(x, *STATE, use_input_stats=False), image),
    "layer_norm": (lambda x: F.layer_norm(x, (8,), *LAST), image),
    "layer_norm of two axes": (lambda x: F.layer_norm(x, (5, 8)), image),
    "layer_norm of bfloat16": (lambda x: F.layer_norm(x, (8,), *LAST), lambda: image().bfloat16()),
    "layer_norm of axis 1": (lambda x: F.layer_norm(x, (C,), WEIGHT, BIAS, dim=1), image),
    "layer_norm of axis -2": (lambda x: F.layer_norm(x, (5,), dim=-2), lambda: image().to(**last)),
    "rms_norm": (lambda x: F.rms_norm(x, (8,), LAST[0]), image),
    "rms_norm of axis 1": (lambda x: F.rms_norm(x, (C,), WEIGHT, dim=1), image),
    "add_layer_norm": (lambda x, r: F.add_layer_norm(x, r, (8,), *LAST), image, image),
    "add_rms_norm, wide": (lambda x, r: F.add_rms_norm(x, r, (8,)), image, lambda: image().double()),
    **{
        f"conv_batch_norm {mode} {padding} {eps}": (
            lambda x, p=padding, m=mode, e=eps: F.conv_batch_norm(
                x, KERNEL, BIAS, *STATE, padding=p, padding_mode=m, eps_mode=e
            ),
            image,
        )
        for mode, padding, eps in itertools.product(
            ("zeros", "reflect", "circular"), (1, "same", (1, 0)), ("inside", "outside")
        )
    },
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")  # of torch's own functions, who look at sizes
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.sampled(of=3)
def test_a_function_leaves_as_torchs(name):
    function, *makes = FUNCTIONS[name]
    given = tuple(make().requires_grad_() for make in makes)
    expected = function(*given)
    exported = torch.export.export(Function(function), given)
    assert not ours(exported)
    traced = torch.jit.trace(Function(function), given)
    for call in (exported.module(), traced):
        y = call(*given)
        for mine, theirs in zip(*([y], [expected]) if torch.is_tensor(y) else (y, expected), strict=True):
            assert (mine.dtype, mine.shape, mine.stride()) == (theirs.dtype, theirs.shape, theirs.stride())
            assert error_of(mine, theirs) <= max(CLOSE, 2 * torch.finfo(mine.dtype).eps)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: F.batch_norm(x, None, None), "evaluation needs running_mean"),
        (lambda x: F.instance_norm(x, None, None, use_input_stats=False), "evaluation needs running_mean"),
        (lambda x: F.conv_batch_norm(x, KERNEL, None, None, None), "evaluation needs running_mean"),
        (lambda x: F.batch_norm_act(x, *STATE, act="tanh"), "act must be one of"),
        (lambda x: F.conv_batch_norm(x, KERNEL, None, *STATE, eps_mode="no"), "eps_mode must be one of"),
        (lambda x: nn.BatchNorm1d(C).eval()(x), "expected 2D or 3D input"),
    ],
)
def test_what_is_wrong_is_wrong_while_leaving_too(call, message):
    with pytest.raises(leannorm.InputError, match=message):
        torch.export.export(Function(call), (image(),))


@pytest.mark.parametrize(
    ("case", "strict"), [*((case, False) for case in SMALL), (SMALL[0], True), (SMALL[-1], True)], ids=str
)
@pytest.mark.sampled(of=2)
def test_a_model_leaves_as_it_came(case, strict):
    model, x = case.build()
    expected, before = model(x), state(model)
    exported = torch.export.export(model, (x,), strict=strict)
    assert state(model) == before
    assert not ours(exported)
    assert strict or not ours(exported.run_decompositions())
    assert error_of(exported.module()(x), expected) <= CLOSE
    if case.name != "own":
        theirs, _ = case.build(False)
        assert operators(exported) == operators(torch.export.export(theirs, (x,), strict=strict))


WITHOUT = """
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "leannorm":
            raise ModuleNotFoundError("leannorm is hidden")
sys.meta_path.insert(0, Hidden())
import torch
from pathlib import Path
for folder in sorted(Path(sys.argv[1]).iterdir()):
    x, expected = torch.load(folder / "values.pt")
    for run in (torch.export.load(folder / "model.pt2").module(), torch.jit.load(folder / "model.pt")):
        error = (run(x) - expected).abs().max() / expected.abs().max()
        print(folder.name, error.item() <= 1e-5)
assert not any(name.split(".")[0] == "leannorm" for name in sys.modules)
try:
    import leannorm
except ModuleNotFoundError as error:
    print(error)
"""


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_files_run_in_a_process_without_leannorm(tmp_path):
    for i, case in enumerate(SMALL):
        model, x = case.build()
        folder = tmp_path / str(i)
        folder.mkdir()
        torch.save((x, model(x).detach()), folder / "values.pt")
        torch.export.save(torch.export.export(model, (x,)), folder / "model.pt2")
        torch.jit.trace(model, x, check_trace=False).save(folder / "model.pt")
    command = [sys.executable, "-c", WITHOUT, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    wanted = [f"{i} True" for i in range(len(SMALL)) for _ in range(2)]
    assert done.stdout.splitlines() == [*wanted, "leannorm is hidden"]


@pytest.mark.sampled(of=3)
@pytest.mark.filterwarnings("ignore:fold folded nothing")  # of models without batch norm
@pytest.mark.parametrize("case", [c for c in SMALL if not c.lean], ids=str)
def test_a_program_holds_ours_until_it_is_decomposed(case):
    model, x = case.build()
    forked = leannorm.program.fork(model, (x,))
    infer, folded = forked.to_exported("infer"), leannorm.fold(forked).model
    assert ours(infer)
    for exported in (infer, folded):
        plain = exported.run_decompositions()
        assert not ours(plain)
        assert error_of(plain.module()(x), forked.infer(x)) <= CLOSE
    kept = ours(forked.to_exported("train").run_decompositions())
    moving = [m for m in model.modules() if getattr(m, "track_running_stats", False)]
    assert len(kept) >= len(moving)


def test_a_training_graph_keeps_ours_and_its_gradients():
    model = leannorm.convert(
        stock.Sequential(
            stock.Conv2d(3, 8, 3), stock.BatchNorm2d(8, momentum=None), stock.ReLU(), stock.Conv2d(8, 4, 3),
            stock.InstanceNorm2d(4, track_running_stats=True), stock.GroupNorm(2, 4),
            nn.ConvBatchNorm2d(4, 4, 3), stock.Flatten(2), stock.LayerNorm(36),
        )
    ).double()  # fmt: skip
    other, x = copy.deepcopy(model), torch.randn(4, *IMAGE, dtype=torch.float64)
    exported = torch.export.export(other, (x,))
    kept = {"tracked_batch_norm", "layer_instance_norm", "conv_batch_norm"}
    assert {name.split(".")[1] for name in ours(exported)} == kept
    run = exported.module()
    for call in (model, run):
        call(x).square().cos().sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(other.get_parameter(name).grad, parameter.grad, msg=name)
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(run.state_dict()[name], buffer, msg=name)


def test_the_operators_layer_traces_with_fx():
    layer, x = nn.BatchNormOp(3, data_layout="NHWC").eval(), torch.randn(2, 4, 4, 3)
    assert torch.equal(torch.fx.symbolic_trace(layer)(x), layer(x))


def test_autocast_leaves_with_the_dtypes_of_ours():
    model, x = Case("convolutional").build()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = model(x)
        exported = torch.export.export(model, (x,))
        y = exported.module()(x)
    assert not ours(exported)
    assert (y.dtype, expected.dtype) == (torch.bfloat16, torch.bfloat16)
    assert error_of(y, expected) <= 2 * torch.finfo(torch.bfloat16).eps


@pytest.mark.conformance
@pytest.mark.timeout(600)
def test_aotinductor_compiles_it(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    layers = (stock.Conv2d(3, 8, 3), stock.BatchNorm2d(8), stock.ReLU(), stock.GroupNorm(2, 8))
    model = leannorm.convert(stock.Sequential(*layers, stock.Flatten(), stock.LayerNorm(800))).eval()
    x = torch.randn(2, *IMAGE)
    path = torch._inductor.aoti_compile_and_package(
        torch.export.export(model, (x,)), package_path=str(tmp_path / "model.pt2")
    )
    assert error_of(torch._inductor.aoti_load_package(path)(x), model(x)) <= CLOSE
