"""`lean()` closes its hooks on every exit, says why it saved less than asked, and can check itself."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from test_lean_sound import BOTH, IMAGE, assert_as_stock, convolutions, image
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from leannorm.saving import lean, make_lean, reasons

VALUES = Path(__file__).parents[2] / "csrc" / "nodes" / "record" / "values.h"


def hooks_are_open():
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


# ---------------------------------------------------------------- isolation


@pytest.mark.parametrize("setting", [*BOTH, pytest.param({"budget": 0.3}, id="budget")])
@pytest.mark.filterwarnings("ignore:leannorm. budget")
def test_a_logged_tensor_that_is_edited_in_place_afterwards(setting):
    def program(context):
        conv, other = convolutions()
        x = image()
        with context():
            y = conv(x)
            y.square().mean()
            loss = other(F.relu(y, inplace=True)).square().mean()
        loss.backward()
        return conv.weight.grad, other.weight.grad, x.grad

    assert_as_stock(program, **setting)


@pytest.mark.parametrize("name", ["ConvNorm", "ChannelNorm", "RowNorm", "GatedNorm", "ChannelAffine", "Relu"])
def test_a_function_of_the_users_may_have_any_name(name):
    def forward(ctx, x):
        ctx.save_for_backward(
            *(x * i for i in range({"ChannelNorm": 9, "ChannelAffine": 9, "RowNorm": 5}.get(name, 6)))
        )
        return x * 2

    def backward(ctx, g):
        return g * 2 + ctx.saved_tensors[3]

    members = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    function = type(name, (torch.autograd.Function,), members)

    def program(context):
        conv, _ = convolutions()
        x = image()
        with context():
            loss = conv(function.apply(x * 1.0)).square().sum()
        loss.backward()
        return conv.weight.grad, x.grad

    assert_as_stock(program, recompute="norm")


# ---------------------------------------------------------------- closing


class Interrupted(nn.Module):
    error: type[BaseException] | None = None

    def forward(self, x):
        if self.error:
            raise self.error
        return x


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ZeroDivisionError, GeneratorExit])
def test_hooks_close_on_every_exit(error):
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), Interrupted(), nn.Linear(64, 4))
    make_lean(model, "norm")
    x = torch.randn(32, 64)
    model[2].error = error
    with pytest.raises(error):
        model(x)
    assert not hooks_are_open()
    with pytest.raises(error), lean("norm"):
        model(x)
    assert not hooks_are_open()
    model[2].error = None
    model(x).sum().backward()
    assert not hooks_are_open()


def test_copies_of_a_lean_model_run_with_their_own_parameters():
    model = make_lean(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4)), "norm")
    x = torch.randn(32, 64)
    other = copy.deepcopy(model)
    nn.init.zeros_(other[2].weight), nn.init.zeros_(other[2].bias)
    assert other(x).eq(0).all()
    assert other.forward(x).eq(0).all()
    assert not model(x).eq(0).all()
    replica = model._replicate_for_data_parallel()  # shares `forward`, and has other parameters
    replica._modules = other._modules
    assert replica(x).eq(0).all()


# ---------------------------------------------------------------- reasons


def test_hooks_that_were_there_first_are_named():
    conv, other = convolutions()
    there_first = saved_tensors_hooks(lambda t: t, lambda t: t)
    with there_first, pytest.warns(UserWarning, match="were there first"), lean("norm") as saved:
        other(F.silu(conv(image())))
    assert len(saved.reasons) == 1
    assert saved.kept_bytes == saved.rebuilt_bytes == 0


def test_hooks_within_are_named():
    conv, other = convolutions()

    def offloaded():
        with save_on_cpu():
            return F.silu(conv(image()))

    with pytest.warns(UserWarning, match="such as save_on_cpu"), lean("norm") as saved:
        other(offloaded())
    assert "theirs" in saved.reasons[0]
    with pytest.warns(UserWarning, match="saw no tensor"), lean("norm") as saved, save_on_cpu():
        other(F.silu(conv(image())))
    assert len(saved.reasons) == 1


def test_a_warning_comes_once_for_each_cause(recwarn):
    with saved_tensors_hooks(lambda t: t, lambda t: t):
        for _ in range(3):
            with lean("norm") as saved:
                pass
    assert len(recwarn) == 1
    assert saved.reasons


def test_a_budget_out_of_reach_is_said():
    model, x = nn.LSTM(32, 32, 2), torch.randn(20, 8, 32)
    with pytest.warns(UserWarning, match="budget=0.4 is out of reach"), lean(budget=0.4) as saved:
        y = model(x)
    assert y[0].requires_grad
    assert "of the bytes" in saved.reasons[0]
    with lean(budget=1.0) as saved:
        y = model(x)
    assert not saved.reasons


FREED_WITHIN = reasons.FREED_BEFORE_PLAN, reasons.FREED_WITHIN


@pytest.mark.parametrize("small_ones", [-1, 4 << 20])
@pytest.mark.parametrize(
    "setting", [*BOTH, *({goal: 0.3} for goal in ("budget", "overhead", "peak"))], ids=str
)
def test_a_result_that_is_dropped_in_the_with_statement_is_said(setting, small_ones, monkeypatch, recwarn):
    monkeypatch.setenv("LEANNORM_SMALL_BYTES", str(small_ones))
    model = network()
    for _ in range(3):
        with lean(**setting) as saved:
            model(IMAGE).square().mean()
        assert saved.reasons == [FREED_WITHIN[setting.keys() <= {"recompute"}]]
        assert saved.plan is None
    said = [w for w in recwarn if "leannorm" in str(w.message)]
    assert len(said) == (0 if setting.keys() <= {"recompute"} else 1)
    with lean(**setting) as saved:
        loss = model(IMAGE).square().mean()
    assert saved.rebuilt_bytes > 0
    assert not {*FREED_WITHIN} & {*saved.reasons}
    loss.backward()


def test_compiled_code_is_said():
    torch._dynamo.reset()  # which compiles a forward a few times only, over all tests
    network = lambda: nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4))  # noqa: E731
    x = torch.randn(32, 64)
    with pytest.warns(UserWarning, match="entered inside compiled code"):
        torch.compile(make_lean(network(), "norm"), backend="aot_eager", fullgraph=True)(x)
    compiled = torch.compile(network(), backend="aot_eager")
    with pytest.warns(UserWarning, match="compiled code ran within"), lean("norm") as saved:
        compiled(x).square().sum().backward()
    assert any("compiled code ran within" in reason for reason in saved.reasons)


# ---------------------------------------------------------------- records, verify


def network():
    return nn.Sequential(
        *(nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16), nn.SiLU(), nn.MaxPool2d(2), nn.Conv2d(16, 16, 3)),
        *(nn.GroupNorm(4, 16), nn.ReLU(True), nn.Flatten(2), nn.Linear(25, 32), nn.LayerNorm(32), nn.GELU()),
        nn.Linear(32, 4),
    )


@pytest.mark.parametrize("setting", [*BOTH, pytest.param({"budget": 0.6}, id="budget")])
def test_records_add_up(setting):
    model = network()
    for _ in range(2):
        with lean(**setting) as saved:
            loss = model(IMAGE).square().mean()
            inside = sum(r.bytes for r in saved.records), saved.kept_bytes + saved.rebuilt_bytes
        assert inside[0] == inside[1] > 0
        loss.backward()
        for rebuilt, total in ((False, saved.kept_bytes), (True, saved.rebuilt_bytes)):
            assert sum(r.bytes for r in saved.records if r.rebuilt == rebuilt) == total
        assert saved.records[0]._fields == ("node", "shape", "dtype", "bytes", "rebuilt", "why")


@pytest.mark.parametrize("setting", [*BOTH, pytest.param({"budget": 0.6}, id="budget")])
def test_verify_holds_everything_and_finds_nothing_in_a_sound_model(setting):
    def program(context):
        model = network()
        with context():
            loss = model(IMAGE).square().mean()
        loss.backward()
        return [p.grad for p in model.parameters()]

    assert_as_stock(program, verify=True, **setting)


RECURRENT = {
    "one workspace": (nn.LSTM, torch.randn(16, 64, 64)),
    "a tensor for each step": (nn.GRU, torch.randn(16, 64, 64).requires_grad_()),
}


@pytest.mark.parametrize("case", RECURRENT)
def test_whatever_a_recurrent_layer_holds_is_said(case):
    """By bytes: also what no node made, and many tensors of which each is small."""
    layer, x = RECURRENT[case]
    recurrent = layer(64, 64, batch_first=True)
    with lean("conv") as saved:
        y = F.silu(F.layer_norm(recurrent(x * 1)[0], (64,)))
        loss = y.square().sum()
    loss.backward()
    held = saved.kept_bytes / (saved.kept_bytes + saved.rebuilt_bytes)
    said = sum(float(reason.split(" of the bytes")[0]) for reason in saved.reasons)
    assert held > 0.25
    assert said > held - 0.15, saved.reasons


def test_what_a_setting_leaves_out_is_not_at_fault():
    """A convolution that reads a rebuilt one, and a residual sum of norms: said by the setting's own page."""
    model = nn.Sequential(*(nn.Conv2d(16, 16, 3, groups=16), nn.BatchNorm2d(16), nn.SiLU()) * 4)
    with lean("conv") as saved:
        y = model(torch.randn(8, 16, 48, 48))
        loss = F.relu(F.batch_norm(y, None, None, training=True) + y).square().sum()
    loss.backward()
    assert saved.rebuilt_bytes > saved.kept_bytes
    assert not saved.reasons


@pytest.mark.filterwarnings("ignore:leannorm. budget=0.05 is out of reach")
def test_a_pass_that_follows_a_plan_says_what_its_first_one_did(with_and_without_nodes):
    """What no plan could rebuild is not what the plan keeps."""
    heard = []
    for _ in range(4):
        with lean(budget=0.05) as saved:
            h = F.rrelu(torch.randn(64, 64, requires_grad=True), training=True)  # draws random numbers
            loss = (h * 0.1).exp().exp().exp().mean()
        heard.append([(r.node, r.rebuilt, r.why) for r in saved.records])
        assert any("made of outputs of aten::rrelu_with_noise" in reason for reason in saved.reasons)
        loss.backward()
    assert heard[0] == heard[1] == heard[2] == heard[3]


def test_reasons_have_the_numbers_that_cpp_gives():
    (names,) = re.findall(r"enum class Why : uint8_t \{ (.*?) \}", VALUES.read_text())
    of_cpp = [re.sub(r"(?<!^)(?=[A-Z])", "_", name[1:]).upper() for name in names.split(", ")]
    assert of_cpp == [why.name for why in reasons.Why]
