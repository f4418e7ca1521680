"""One table of activations: C++ and Triton have its rows, in its order, and what is written follows it."""

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from leannorm import functional, nn
from leannorm.ops.activation import ACTIVATIONS
from leannorm.transforms.steps import activation_called, activation_of

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
def test_the_modules_and_functions_of_a_row_compute_it(name):
    """And are recognised as it, with the row's parameters and with no others."""
    row, z = ACTIVATIONS[name], torch.linspace(-7, 7, 99)
    module = row.module(**row.parameters)
    torch.testing.assert_close(module(z), row.forward(z))
    assert activation_of(module) == name
    for called in row.functions:
        compute = getattr(torch.Tensor, called) if isinstance(called, str) else called
        y = compute(z.clone(), **row.parameters)
        torch.testing.assert_close(y, row.forward(z))
        assert activation_called(called, row.parameters) == name
    for key, value in row.parameters.items():
        other = "exact" if isinstance(value, str) else value * 2
        setattr(module, key, other)
        assert activation_of(module) is None
        setattr(module, key, value)
        assert activation_called(row.functions[0], {key: other}) is None


def test_a_function_with_no_parameters_named_has_torchs_defaults():
    z = torch.linspace(-7, 7, 99)
    for called in (F.gelu, F.elu, F.leaky_relu, F.hardtanh):
        torch.testing.assert_close(called(z), ACTIVATIONS[activation_called(called, {})].forward(z))
    assert activation_called(F.softplus, {}) is None
    assert activation_of(torch.nn.Softplus()) is None


def listed(text):
    return re.findall(r"[a-z_0-9]+", re.sub(r"\([^)]*\)|`|and", " ", text))


def test_what_is_written_names_all_of_them():
    page = (ROOT / "docs" / "batch_norm_act.md").read_text()
    assert listed(re.search(r"`act` is one of (.*?)\. Arguments", page).group(1)) == list(ACTIVATIONS)
    page = (ROOT / "docs" / "batch_norm.md").read_text()
    told, rest = re.search(r"follows from it \((.*?);.*?the residual \((.*?)\)", page).groups()
    assert listed(told) == TOLD[1:]
    assert listed(rest) == [name for name in ACTIVATIONS if name not in TOLD]
    for documented in (functional.batch_norm_act, nn.BatchNormAct2d):
        doc = documented.__doc__
        assert listed(re.search(r"one\s+of (.*?)\. (?:Every|All)", doc, re.S).group(1)) == list(ACTIVATIONS)
        assert "gelu_tanh (approximate tanh)" in re.sub(r"\s+", " ", doc)
        assert not re.search(r"<\w+>", doc)
        assert max(map(len, doc.splitlines())) <= 110
