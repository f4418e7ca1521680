"""One table of activations: C++ and Triton have its rows, in its order, and what is written follows it."""

import re
from pathlib import Path

import pytest
import torch

from leannorm import functional, nn
from leannorm._types import Channels, KeptByChannelNorm
from leannorm.ops.activation import ACTIVATIONS
from leannorm.transforms.fusing.steps import activation_of

ROOT = Path(__file__).parents[2]
TOLD = [name for name, activation in ACTIVATIONS.items() if activation.from_output]


def function(text, name):
    """A function's source: up to the next line that is indented no further."""
    return re.search(rf"^[^\n]*\b{name}\(.*?^\S", text, re.M | re.S).group()


def test_csrc_has_the_rows_of_the_table():
    rows = re.findall(r'X\((k\w+), "(\w+)", (true|false)\)', (ROOT / "csrc" / "activation.h").read_text())
    assert [name for _, name, _ in rows] == list(ACTIVATIONS)
    assert [name for _, name, told in rows if told == "true"] == TOLD
    enumerators = {enumerator: name for enumerator, name, _ in rows}
    text = (ROOT / "csrc" / "activations.h").read_text()
    everything = list(ACTIVATIONS)
    kernels = {"activate": everything, "slope_from_input": everything, "slope_from_output": TOLD}
    for kernel, names in kernels.items():
        cases = re.findall(r"case (k\w+):", function(text, kernel))
        assert [enumerators[case] for case in cases] == names[1:], kernel  # identity is the rest


def test_triton_has_the_rows_of_the_table():
    folder = ROOT / "src" / "leannorm" / "ops" / "backends" / "triton"
    text = (folder / "activations.py").read_text()
    for kernel in ("activate", "derivative"):
        branches = re.findall(r'ACT == "(\w+)"', function(text, f"def {kernel}"))
        assert branches == list(ACTIVATIONS)[1:], kernel
    special = re.findall(r'ACT == "(\w+)"', function(text + "end", "def derivative_from_output"))
    assert set(special) <= set(TOLD)


@pytest.mark.parametrize("name", list(ACTIVATIONS)[1:])
def test_the_module_of_a_row_computes_it(name):
    """And is recognised as it, with the row's parameters and with no others."""
    row, z = ACTIVATIONS[name], torch.linspace(-7, 7, 99)
    module = row.module(**row.parameters)
    torch.testing.assert_close(module(z), row.forward(z))
    assert activation_of(module) == name
    for key, value in row.parameters.items():
        other = "exact" if isinstance(value, str) else value * 2
        setattr(module, key, other)
        assert activation_of(module) is None
        setattr(module, key, value)
    assert activation_of(torch.nn.Softsign()) is None


def listed(text):
    return re.findall(r"[a-z_0-9]+", re.sub(r"\([^)]*\)|`|and", " ", text))


def test_what_is_written_names_all_of_them():
    page = (ROOT / "docs" / "batch_norm_act.md").read_text()
    assert listed(re.search(r"`act` is one of (.*?)\. Arguments", page).group(1)) == list(ACTIVATIONS)
    for documented in (functional.batch_norm_act, nn.BatchNormAct2d):
        doc = documented.__doc__
        assert listed(re.search(r"one\s+of (.*?)\. (?:Every|All)", doc, re.S).group(1)) == list(ACTIVATIONS)
        assert "gelu_tanh (approximate tanh)" in re.sub(r"\s+", " ", doc)
        assert not re.search(r"<\w+>", doc)
        assert max(map(len, doc.splitlines())) <= 110
    doc = re.sub(r"\s+", " ", functional.batch_norm_act.__doc__)
    told, rest = re.search(r"computed from the output for (.*?), and not for (.*?)\.", doc).groups()
    assert listed(told) == TOLD[1:]
    assert listed(rest) == [name for name in ACTIVATIONS if name not in TOLD]


OUTSIDE = [1e2, 1e5, 1e6, 1e30, 3e38]  # far out, where squares overflow and what should cancel may not


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", list(ACTIVATIONS)[1:])
@pytest.mark.sampled(of=2)
def test_far_out_each_is_its_asymptote(name, dtype, kernels):
    """Values and derivatives at 0, past all bends, and at NaN, where torch's own overflow in places."""
    largest = torch.finfo(dtype).max / 8  # hardswish multiplies by 6 before it divides
    tiny = torch.finfo(dtype).tiny
    outside = [min(z, largest) for z in OUTSIDE]
    sides = {-1: [-z for z in outside], 0: [0.0, -0.0, tiny, -tiny], 1: outside}
    limits = {"hardtanh": (0, 0), "relu6": (0, 0), "leaky_relu": (0.01, 1)}.get(name, (0, 1))
    for side, values in sides.items():
        z = torch.tensor([*values, float("nan")], dtype=dtype)[:, None].expand(-1, 4).contiguous()
        mean, rstd = torch.zeros(4, dtype=torch.float64), torch.ones(4, dtype=torch.float64)
        kept = KeptByChannelNorm(z, mean, rstd, norm=Channels(act=name))
        y = kernels.channel_normalize(kept)
        slope, _ = kernels.channel_input_grad(torch.ones_like(z), kept)
        plain = ACTIVATIONS[name].grad(z.to(torch.promote_types(dtype, torch.float32))).to(dtype)
        wanted = ACTIVATIONS[name].forward(z.double()).to(dtype)
        torch.testing.assert_close(y, wanted, equal_nan=True)
        torch.testing.assert_close(slope, plain, equal_nan=True)
        if side:
            asymptote = torch.full_like(slope[:-1], limits[side > 0])
            torch.testing.assert_close(slope[:-1], asymptote)
            torch.testing.assert_close(plain[:-1], asymptote)


def test_the_slope_of_gelu_tanh_has_a_slope_far_out():
    z = torch.tensor([-1e30, -11.0, 11.0, 1e30], requires_grad=True)
    slope = ACTIVATIONS["gelu_tanh"].grad(z)
    assert slope.tolist() == [0, 0, 1, 1]
    assert torch.autograd.grad(slope.sum(), z)[0].tolist() == [0, 0, 0, 0]
