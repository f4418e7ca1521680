"""Lines that normalize: torch's functions and layers and leannorm's, by every mix of weight and bias."""

from __future__ import annotations

import re

import torch

_CHANNELS, _ROWS = {8, 16, 24, 32, 48, 64, 96, 128}, {8, 16, 24, 32, 48, 64, 96, 128}


def of_channels(t):
    return t.dim() > 1 and t.shape[1] in _CHANNELS


def of_rows(t):
    return t.dim() > 1 and t.shape[-1] in _ROWS


def _vector(g, size, dtype=torch.float32):
    """A weight or bias: none, trained, frozen, a plain buffer, of the input's dtype or another."""
    if g.chance(0.35):
        return "None"
    other = torch.float32 if dtype == torch.bfloat16 and g.chance(0.6) else dtype
    return g.leaf((size,), torch.bfloat16 if g.chance(0.03) else other)


_AFFINE = re.compile(r", (w\d+|None), (w\d+|None)(?=, (True|False)|\)$|, 0\.01\)$)")


def with_other_affine(g, name, text):
    """The norm that made `name`, with another mix of weight and bias."""
    found = _AFFINE.search(text)
    if not found or name not in g.names:
        return text
    t = g.names[name]
    if t.dim() < 2:  # the name is of what another line has made of it since
        return text
    size = t.shape[-1 if "layer_norm" in text else 1]
    kinds = "parameter", "frozen", "buffer"
    weight, bias = (g.pick("None", g.leaf((size,), t.dtype, kinds)) for _ in range(2))
    return f"{text[: found.start()]}, {weight}, {bias}{text[found.end() :]}"


def _statistics(g, size):
    if g.chance(0.4):
        return "None", "None"
    return g.leaf((size,), kinds=("buffer",), letter="r"), g.leaf((size,), kinds=("positive",), letter="v")


def by_batch(g, inner):
    name = g.tensor(of_channels)
    if name is None:
        return None
    t = g.names[name]
    c, module = t.shape[1], g.pick("F", "F", "LF")
    mean, var = _statistics(g, c)
    weight, bias = _vector(g, c, t.dtype), _vector(g, c, t.dtype)
    training = mean == "None" or g.chance(0.7)
    eps = g.pick("", "", ", 0.1, 0.001")
    if module == "F" and mean != "None" and g.program.forwards == 1 and g.chance(0.06):
        weight, bias = g.pick((var, bias), (weight, var), (weight, mean))  # which the call itself moves
    if module == "LF" and g.chance(0.4):
        act = g.pick("relu", "silu", "hardswish", "gelu", "identity")
        residual = g.rng.choice(g.tensors(lambda u: u.shape == t.shape and u.dtype == t.dtype) or ["None"])
        residual = f", residual={residual}" if g.chance(0.3) else ""
        call = f"{inner(name)}, {mean}, {var}, {weight}, {bias}, {training}, act={act!r}{residual}"
        return f"{g.fresh()} = LF.batch_norm_act({call})"
    return (
        f"{g.fresh()} = {module}.batch_norm({inner(name)}, {mean}, {var}, {weight}, {bias}, {training}{eps})"
    )


def by_instance(g, inner):
    name = g.tensor(lambda t: of_channels(t) and t.dim() > 2)
    if name is None:
        return None
    c, dtype, module = g.names[name].shape[1], g.names[name].dtype, g.pick("F", "F", "LF")
    mean, var = _statistics(g, c)
    own = mean == "None" or g.chance(0.7)
    return (
        f"{g.fresh()} = {module}.instance_norm({inner(name)}, {mean}, {var},"
        f" {_vector(g, c, dtype)}, {_vector(g, c, dtype)}, {own})"
    )


def may_crash_torch(listing):
    """torch 2.13 crashes in group norm's backward pass if its channels_last input gets no gradient."""
    return re.search(r"group_norm|GroupNorm", listing) is not None and "_last" in listing


def _bears_group_norm(t):
    return of_channels(t) and (t.requires_grad or t.is_contiguous())


def by_group(g, inner):
    name = g.tensor(_bears_group_norm)
    if name is None:
        return None
    c, dtype, module = g.names[name].shape[1], g.names[name].dtype, g.pick("F", "F", "LF")
    groups, eps = g.pick(1, 2, 4, c), g.pick("", "", ", 0.01")
    weight, bias = _vector(g, c, dtype), _vector(g, c, dtype)
    return f"{g.fresh()} = {module}.group_norm({inner(name)}, {groups}, {weight}, {bias}{eps})"


def by_row(g, inner):
    name = g.tensor(of_rows)
    if name is None:
        return None
    d, dtype, module = g.names[name].shape[-1], g.names[name].dtype, g.pick("F", "F", "LF")
    weight, bias, eps = _vector(g, d, dtype), _vector(g, d, dtype), g.pick("", "", ", 0.01")
    if g.chance(0.35):
        return f"{g.fresh()} = {module}.rms_norm({inner(name)}, ({d},), {weight}{eps})"
    return f"{g.fresh()} = {module}.layer_norm({inner(name)}, ({d},), {weight}, {bias}{eps})"


def by_layer(g, inner):
    """A layer made before the loop."""
    images = g.tensor(lambda t: t.dim() == 4 and _bears_group_norm(t) and t.dtype == torch.float32)
    rows = g.tensor(lambda t: of_rows(t) and t.dtype == torch.float32)
    kind = g.pick("image", "row")
    name = images if kind == "image" else rows
    if name is None:
        return None
    size = g.names[name].shape[1 if kind == "image" else -1]
    module = g.pick("nn", "lnn")
    image = f"BatchNorm2d({size}{g.pick('', ', momentum=None', ', affine=False')})", f"GroupNorm(2, {size})"
    image += f"InstanceNorm2d({size}, affine={g.pick(True, False)})", f"BatchNorm2d({size}).eval()"
    row = f"LayerNorm({size}{g.pick('', ', bias=False', ', elementwise_affine=False')})", f"RMSNorm({size})"
    made = f"{module}.{g.pick(*(image if kind == 'image' else row))}"
    if kind == "image" and g.chance(0.2):
        made = f"lnn.ConvBatchNorm2d({size}, {g.pick(8, 16)}, 3{g.pick('', ', padding=1', ', bias=True')})"
    layer = g.fresh("m")
    g.set_up(f"{layer} = {made}")
    return f"{g.fresh()} = {layer}({inner(name)})"


NORMS = [by_batch, by_batch, by_batch, by_instance, by_group, by_row, by_row, by_layer]
