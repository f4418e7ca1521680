"""What a line of a random program may do. Each function makes a line, or several, or None if nothing fits."""

from __future__ import annotations

import re

import torch

from programs.norms import NORMS, of_channels, of_rows, with_other_affine
from programs.run import is_leaf

BLOCKS = [
    "autocast()",
    "autocast()",
    "autocast(enabled=False)",
    "autocast(cache_enabled=False)",
    "mkldnn(False)",
    "mkldnn(False)",
    'matmul("medium")',
    "deterministic(False)",
    "deterministic(True)",
    'lean("conv")',
    "lean()",
    "suppressed()",
]
_ELEMENTWISE = [
    "F.relu({})",
    "F.relu({})",
    "torch.sigmoid({})",
    "torch.tanh({})",
    "F.silu({})",
    "F.silu({})",
    "F.gelu({})",
    'F.gelu({}, approximate="tanh")',
    "F.hardswish({})",
    "F.hardsigmoid({})",
    "F.hardtanh({}, -0.5, 0.7)",
    "F.relu6({})",
    "F.leaky_relu({}, 0.1)",
    "F.elu({})",
    "F.celu({}, 0.5)",
    "F.selu({})",
    "F.softplus({})",
    "F.mish({})",
    "F.logsigmoid({})",
    "{}.softmax(-1)",
]
_IN_PLACE = [
    "F.relu_({})",
    "F.relu({}, inplace=True)",
    "F.silu({}, inplace=True)",
    "F.hardswish({}, inplace=True)",
    "F.leaky_relu({}, 0.1, inplace=True)",
    "F.elu({}, inplace=True)",
    "F.celu_({}, 0.5)",
    "F.mish({}, inplace=True)",
    "F.hardtanh({}, -0.5, 0.5, inplace=True)",
    "{}.sigmoid_()",
    "{}.tanh_()",
    "{}.mul_(0.5)",
    "{}.add_(0.25)",
    "{}.clamp_(max=0.3)",
    "Negate.apply({})",
]
_COPIES = [
    "{}.to({}.dtype, copy=True)",
    "{}.to({}.dtype, copy=True)",
    "{}.clone()",
    "({} * 1.0)",
    "{}.to(torch.bfloat16)",
    "{}.to(torch.bfloat16)",
    "{}.double()",
    "{}.float()",
    "{}.to(torch.float32)",
    "{}.contiguous()",
    "{}.type_as({})",
]
_USERS = [
    "ConvNorm",
    "ChannelNorm",
    "RowNorm",
    "ChannelAffine",
    "SyncNorm",
    "UserSin",
    "UserSilu",
    "UserRelu",
]
_USERS += ["Posing", "Exp"]


def _inner(g, name):
    """The tensor, or something made of it on the way."""
    if g.chance(0.7):
        return name
    return g.pick(*_COPIES, *_ELEMENTWISE).replace("{}", name)


def norm(g):
    """Mostly with something behind it that keeps what the norm put out."""
    text = g.pick(*NORMS)(g, lambda name: _inner(g, name))
    if text is None or g.chance(0.3):
        return text
    if not g.add(text):
        return None
    g.focus = text.split(" ")[0]
    if g.chance(0.3):
        g.add(g.pick(activation, convolution, linear, scale)(g))
        return again(g)
    return g.pick(activation, activation, activation_in_place, convolution, linear, scale, combine)(g)


def again(g):
    """An earlier line once more, with another number, or a weight more or less: one key must not fit both."""
    lines = [line.text for line in g.lines if re.match(r"y\d+ = [^@]*\(", line.text)]
    norms = [text for text in lines if "norm(" in text]
    if not lines:
        return None
    made, text = g.rng.choice(norms if norms and g.chance(0.7) else lines).split(" = ", 1)
    other = with_other_affine(g, made, text) if g.chance(0.6) else text
    text = _with_another_number(g, text) if other == text else other
    y = g.fresh()
    if not g.add(f"{y} = {text}"):
        return None
    g.focus = y
    return g.pick(activation, convolution, linear, scale)(g)


def _with_another_number(g, text):
    places = list(re.finditer(r"\b\d\.\d+\b", text))
    if not places:
        return text
    place = g.rng.choice(places)
    return text[: place.start()] + g.pick("0.1", "0.25", "0.6") + text[place.end() :]


def activation(g):
    name = g.tensor()
    return name and f"{g.fresh()} = {g.pick(*_ELEMENTWISE).format(_inner(g, name))}"


def activation_in_place(g):
    name = g.tensor(lambda t: not is_leaf(t))
    form = g.pick(*_IN_PLACE).format(name)
    return name and (form if g.chance(0.5) else f"{g.fresh() if g.chance(0.5) else name} = {form}")


def copy(g):
    name = g.rng.choice(g.leaves()) if g.chance(0.25) and g.leaves() else g.tensor()
    return name and f"{g.fresh()} = {g.pick(*_COPIES).replace('{}', name)}"


def _weight(g, shape, dtype):
    """A weight that the tensor's dtype can meet: its own, cast, or, under autocast, any."""
    if g.autocast() or dtype == torch.float32:
        name = g.leaf(shape)
        return g.pick(name, name, name, f"{name}.to({name}.dtype, copy=True)", f"F.relu({name})")
    return g.leaf(shape, dtype) if g.chance(0.3) else f"{g.leaf(shape)}.to({dtype})"


def convolution(g):
    name = g.tensor(lambda t: t.dim() == 4 and of_channels(t) and t.shape[-1] > 2)
    if name is None:
        return None
    t, groups, k = g.names[name], g.pick(1, 1, 1, 8), g.pick(1, 3)
    outputs = g.pick(8, t.shape[1], 16)
    weight = _weight(g, (outputs, t.shape[1] // groups, k, k), t.dtype)
    bias = _weight(g, (outputs,), t.dtype) if g.chance(0.5) else None
    padding = g.pick(f", padding={k // 2}", f", padding={k // 2}", "") if k > 1 else ""
    groups = f", groups={groups}" if groups > 1 else ""
    return f"{g.fresh()} = F.conv2d({_inner(g, name)}, {weight}, {bias}{padding}{groups})"


def linear(g):
    name = g.tensor(lambda t: t.dim() in (2, 3) and of_rows(t))
    if name is None:
        return None
    t, outputs = g.names[name], g.pick(32, 48, 64, g.names[name].shape[-1])
    x, width = _inner(g, name), t.shape[-1]
    if g.chance(0.3):
        return f"{g.fresh()} = {x} @ {_weight(g, (width, outputs), t.dtype)}"
    bias = _weight(g, (outputs,), t.dtype) if g.chance(0.5) else None
    return f"{g.fresh()} = F.linear({x}, {_weight(g, (outputs, width), t.dtype)}, {bias})"


def product(g):
    """Attention's products, and one of a weight with a weight."""
    name = g.tensor(lambda t: t.dim() == 3)
    if name is None or g.chance(0.2):
        a, b = (_weight(g, (48, 48), torch.float32) for _ in range(2))
        return f"{g.fresh()} = {a} @ {b}"
    x = _inner(g, name)
    forms = "({} @ {}.mT).softmax(-1) @ {}", "{} @ {}.mT", "torch.baddbmm({}, {} @ {}.mT, {}, beta=0.5)"
    return f"{g.fresh()} = {g.pick(*forms).replace('{}', x)}"


def view(g):
    name = g.tensor()
    if name is None:
        return None
    t, y = g.names[name], g.fresh()
    forms = [f"{y} = {name}.flatten(1)", f"{y} = {name}.view(-1)", f"{y} = {name}[1:]"]
    forms += [f"{y} = {name}.transpose(1, -1)", f"{y} = {name}.unsqueeze(1).expand(-1, 2, *{name}.shape[1:])"]
    forms += [f"{y}, {g.fresh()} = {name}.chunk(2, 1)", f"{y} = {name}[:, 1:-1]", f"{y} = {name}.alias()"]
    if t.dim() == 4:
        forms += [f"{y} = {name}.contiguous(memory_format=torch.channels_last)"] * 3
        forms += [
            f"{y} = {name}.permute(0, 2, 3, 1)",
            f"{y} = {name}.flatten(2)",
            f"{y} = {name}.flatten(2).mT",
        ]
        forms += [f"{y} = {name}.permute(0, 2, 3, 1).contiguous()", f"{y} = {name}.roll((1, 2), (2, 3))"]
    if t.dim() == 3:
        forms += [
            f"{y} = {name}.mT",
            f"{y} = {name}.reshape(-1, {name}.shape[-1])",
            f"{y} = {name}.mT.contiguous()",
        ]
    return g.pick(*forms).replace(".alias()", "[...]")


def combine(g):
    name = g.tensor()
    if name is None:
        return None
    t = g.names[name]
    other = g.rng.choice(g.tensors(lambda u: u.shape == t.shape) or [name])
    y = g.fresh()
    forms = [f"{y} = {name} + {other}", f"{y} = {name} * {other}", f"{y} = torch.cat([{name}, {other}], 1)"]
    forms += [
        f"{y} = {name} - {other}",
        f"{name}.add_({other})",
        f"{name} += {other}",
        f"{name}.mul_({other})",
    ]
    forms += [f"{y} = torch.cat([{other}, F.relu({name})], 1)", f"{y} = torch.sigmoid({name}) * {other}"]
    forms += [f"{y} = torch.where({name} > 0, {name}, {other})", f"{y} = {name} + {_inner(g, other)}"]
    return g.pick(*forms)


def scale(g):
    name = g.tensor()
    if name is None:
        return None
    t, x, y = g.names[name], _inner(g, name), g.fresh()
    forms = [f"{y} = {x} * 0.7", f"{y} = F.dropout({x}, 0.3)", f"{y} = {x} / 3", f"{y} = {x}.square()"]
    if of_channels(t) and t.dim() == 4:
        forms += [
            f"{y} = {x} * {g.leaf((t.shape[1],))}.view(-1, 1, 1)",
            f"{y} = F.prelu({x}, {g.leaf((1,))})",
        ]
        forms += [f"{y} = F.max_pool2d({x}, 2)", f"{y} = F.avg_pool2d({x}, 2)", f"{y} = F.pad({x}, (0, 1))"]
        forms += [f"{y} = {x} * {x}.mean((2, 3), keepdim=True).sigmoid()", f"{y} = F.glu({x}, 1)"]
    if of_rows(t):
        forms += [f"{y} = {x} * {g.leaf((t.shape[-1],))}", f"{y} = {x} + {g.leaf((t.shape[-1],))}"]
    return g.pick(*forms)


def user_function(g):
    name = g.tensor()
    if name is None:
        return None
    if g.chance(0.1):
        return f"{g.fresh()}, {g.fresh()} = Halves.apply({name})"
    return f"{g.fresh()} = {g.pick(*_USERS)}.apply({_inner(g, name)})"


def log(g):
    name = g.tensor()
    forms = (
        "log = {}.square().mean()",
        "log = {}.float().norm()",
        "log = F.silu({}).mean()",
        "log = {}.detach()",
    )
    return name and g.pick(*forms).format(name)


def part_in_checkpoint(g):
    name = g.tensor()
    if name is None:
        return None
    t, inner = g.names[name], g.pick(*_ELEMENTWISE).format("a")
    if of_channels(t) and t.dim() == 4 and g.chance(0.5):
        inner = f"F.conv2d({inner}, {_weight(g, (8, t.shape[1], 1, 1), t.dtype)})"
    elif of_rows(t) and g.chance(0.5):
        inner = f"F.layer_norm({inner}, ({t.shape[-1]},))"
    return f"{g.fresh()} = checkpoint(lambda a: {inner}, {name}, use_reentrant={g.pick(True, False)})"


def hidden_edit(g):
    """With a reader behind it that saves what was edited."""
    name = g.tensor(lambda t: not is_leaf(t))
    if name is None:
        return None
    if g.chance(0.4):
        text, name = (
            f"{g.pick(*_ELEMENTWISE).format(g.pick('{}.clone()', '{} * 1.0').format(name))}",
            g.fresh(),
        )
        if not g.add(f"{name} = {text}"):
            return None
    step = g.pick("", "if i: ")
    edits = (
        f"{step}{name}.detach().mul_(2)",
        f"{step}{name}.data.mul_(2)",
        f"{step}{name}.detach().clamp_(max=0.1)",
    )
    no_grad = f"with torch.no_grad(): {name}.clamp_(max=0.1)", f"with torch.no_grad(): {name}.add_(0.5)"
    readers = [
        (f"{g.fresh()} = " + form).replace("{}", name) for form in ("F.silu({})", "{}.square()", "{} * {}")
    ]
    if g.names[name].dim() == 4 and of_channels(g.names[name]):
        c = g.names[name].shape[1]
        readers += [f"{g.fresh()} = F.conv2d({name}, {_weight(g, (8, c, 1, 1), g.names[name].dtype)})"] * 2
    return [
        *([g.pick(*readers).replace("y", "z", 1)] if g.chance(0.3) else []),
        g.pick(*edits, *no_grad),
        g.pick(*readers),
    ]


def visible_edit(g):
    name = g.tensor(lambda t: not is_leaf(t))
    forms = "{}[:, 0] = 0", "{}.mul_(1.5)", "{}[1:].mul_(2)", "{}.zero_()", "{}.masked_fill_({} > 1, 0.5)"
    return name and g.pick("", "", "if i: ") + g.pick(*forms).replace("{}", name)


def leaf_edit(g):
    names = g.leaves() + g.tensors(is_leaf)
    if not names:
        return None
    forms = (
        "with torch.no_grad(): {}.mul_(1.5)",
        "{}.data.mul_(1.5)",
        "{}.data.add_(0.25)",
        "{}.data = {}.data * 1.5",
    )
    form = g.pick(*forms)
    return ("" if form.startswith("with") else g.pick("", "if i: ")) + form.replace("{}", g.rng.choice(names))


def cached(g):
    """Made in the first step, outside or inside of lean(), and used in all of them."""
    names = [name for name in g.leaves() if g.run.shared[name].numel() >= 1024]
    if not names:
        return None
    name, y = g.rng.choice(names), g.fresh()
    forms = "{}.to(torch.bfloat16)", "{}.to({}.dtype, copy=True)", "{}.detach().to(torch.bfloat16)", "{}.mT"
    form = g.pick(*forms).replace("{}", name)
    if g.chance(0.5):
        g.set_up(f"{y} = {form}")
        return f"{g.fresh()} = {y} * 1" if g.chance(0.5) else f"{g.fresh()} = {y} @ {y}.mT"
    return f"{y} = cached({y!r}, lambda: {form})"


def stop(g):
    name = g.tensor()
    step = g.pick("i == 0", "i == 1")
    return name and f"interrupt({step}, {name}{g.pick('', '', ', ValueError')})"


def forget(g):
    name = g.tensor()
    return name and f"del {name}"


OPERATIONS = {
    norm: 18,
    activation: 9,
    again: 6,
    activation_in_place: 7,
    copy: 7,
    convolution: 10,
    linear: 9,
    product: 4,
    view: 7,
    combine: 7,
    scale: 6,
    user_function: 3,
    log: 3,
    part_in_checkpoint: 2,
    hidden_edit: 3,
    visible_edit: 2,
    leaf_edit: 1,
    cached: 2,
    stop: 1,
    forget: 1,
}
