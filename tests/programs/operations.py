"""What a line of a random program may do. Each function makes a line, or several, or None if nothing fits."""

from __future__ import annotations

import re

import torch

from programs import meanwhile
from programs.edits import activation_in_place, hidden_edit, leaf_edit, visible_edit
from programs.norms import NORMS, of_channels, of_rows, with_other_affine
from programs.parts import COPIES, ELEMENTWISE, inner, weight

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
    'lean("norm")',
    'taking_turns(lean("conv"), lean("norm"))',
    "suppressed()",
    "torch.no_grad()",
    "torch.autograd.graph.save_on_cpu()",
]
_USERS = [
    "ConvNorm",
    "ChannelNorm",
    "RowNorm",
    "ChannelAffine",
    "GatedNorm",
    "UserSin",
    "UserSilu",
    "UserRelu",
]
_USERS += ["Posing", "Exp"]


def norm(g):
    """Mostly with something behind it that keeps what the norm put out."""
    text = next(filter(None, (g.pick(*NORMS)(g, lambda name: inner(g, name)) for _ in range(5))), None)
    if text is None or g.chance(0.3):
        return text
    if not g.add(text):
        return None
    g.focus = text.split(" ")[0]
    if g.chance(0.3):
        g.add(g.pick(activation, layer, scale)(g))
        return again(g)
    return g.pick(activation, activation, activation_in_place, layer, layer, scale, combine)(g)


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
    return g.pick(activation, layer, scale)(g)


def _with_another_number(g, text):
    places = list(re.finditer(r"\b\d\.\d+\b", text))
    if not places:
        return text
    place = g.rng.choice(places)
    return text[: place.start()] + g.pick("0.1", "0.25", "0.6") + text[place.end() :]


def activation(g):
    name = g.tensor()
    return name and f"{g.fresh()} = " + g.pick(*ELEMENTWISE).replace("{}", inner(g, name))


def copy(g):
    name = g.rng.choice(g.leaves()) if g.chance(0.25) and g.leaves() else g.tensor()
    return name and f"{g.fresh()} = {g.pick(*COPIES).replace('{}', name)}"


def convolution(g):
    name = g.tensor(lambda t: t.dim() in (4, 5) and of_channels(t) and t.shape[-1] > 2)
    if name is None:
        return None
    t, groups, k = g.names[name], g.pick(1, 1, 1, 8), g.pick(1, 3)
    outputs, axes = g.pick(8, t.shape[1], 16), t.dim() - 2
    if g.chance(0.25):
        kernel, x = weight(g, (t.shape[1], outputs, *[2] * axes), t.dtype), inner(g, name)
        return f"{g.fresh()} = F.conv_transpose{axes}d({x}, {kernel}, None, {g.pick(1, 2)})"
    if axes == 3 and t.shape[2] < 3:
        k = 1
    kernel = weight(g, (outputs, t.shape[1] // groups, *[k] * axes), t.dtype)
    bias = weight(g, (outputs,), t.dtype) if g.chance(0.5) else None
    padding = g.pick(f", padding={k // 2}", f", padding={k // 2}", "") if k > 1 else ""
    groups = f", groups={groups}" if groups > 1 else ""
    return f"{g.fresh()} = F.conv{axes}d({inner(g, name)}, {kernel}, {bias}{padding}{groups})"


def linear(g):
    name = g.tensor(lambda t: t.dim() in (2, 3) and of_rows(t))
    if name is None:
        return None
    t, outputs = g.names[name], g.pick(32, 48, 64, g.names[name].shape[-1])
    x, width = inner(g, name), t.shape[-1]
    if g.chance(0.3):
        return f"{g.fresh()} = {x} @ {weight(g, (width, outputs), t.dtype)}"
    bias = weight(g, (outputs,), t.dtype) if g.chance(0.5) else None
    return f"{g.fresh()} = F.linear({x}, {weight(g, (outputs, width), t.dtype)}, {bias})"


def layer(g):
    """A convolution or a linear layer, whichever fits."""
    first, second = g.pick((convolution, linear), (linear, convolution))
    return first(g) or second(g)


def product(g):
    """Attention's products, and one of a weight with a weight."""
    name = g.tensor(lambda t: t.dim() == 3 and t.dtype == torch.float32)
    if name is not None and of_rows(g.names[name]) and g.chance(0.2):
        d = g.names[name].shape[-1]
        attention = g.fresh("m")
        g.set_up(f"{attention} = nn.MultiheadAttention({d}, 4, batch_first=True)")
        return f"{g.fresh()} = {attention}({name}, {name}, {name}, need_weights={g.pick(True, False)})[0]"
    name = g.tensor(lambda t: t.dim() == 3)
    if name is None or g.chance(0.2):
        a, b = (weight(g, (48, 48), torch.float32) for _ in range(2))
        return f"{g.fresh()} = {a} @ {b}"
    x = inner(g, name)
    forms = "({} @ {}.mT).softmax(-1) @ {}", "{} @ {}.mT", "torch.baddbmm({}, {} @ {}.mT, {}, beta=0.5)"
    forms += "F.scaled_dot_product_attention({}, {}, {})", "torch.einsum('btc,bsc->bts', {}, {})"
    return f"{g.fresh()} = {g.pick(*forms).replace('{}', x)}"


def view(g):
    name = g.tensor()
    if name is None:
        return None
    t, y = g.names[name], g.fresh()
    forms = [f"{y} = {name}.flatten(1)", f"{y} = {name}.view(-1)", f"{y} = {name}[1:]"]
    forms += [f"{y} = {name}.transpose(1, -1)", f"{y} = {name}.unsqueeze(1).expand(-1, 2, *{name}.shape[1:])"]
    forms += [f"{y} = {name}.repeat(1, 2, *[1] * ({name}.dim() - 2))"]
    forms += [f"{y} = {name}.index_select(1, torch.tensor([1, 0, 1]))", f"{y}, *rest = {name}.unbind(1)"]
    forms += [f"{y} = torch.stack([{name}, {name}], 1).flatten(0, 1)"]
    forms += [f"{y}, {g.fresh()} = {name}.chunk(2, 1)", f"{y} = {name}[:, 1:-1]", f"{y} = {name}.alias()"]
    if t.dim() == 4:
        forms += [f"{y} = {name}.contiguous(memory_format=torch.channels_last)"] * 3
        forms += [
            f"{y} = {name}.clone(memory_format=torch.{g.pick('channels_last', 'contiguous_format')})",
            f"{y} = {name}.to(torch.float32, memory_format=torch.channels_last, copy=True)",
            f"{y} = {name}.{g.pick('contiguous', 'clone', 'float')}().mean((1, 2, 3), keepdim=True) * {name}",
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
    forms += [f"{y} = torch.stack([{name}, {name}.flip(1)], 1).flatten(0, 1)", f"{y} = {name}.flip((0, -1))"]
    return g.pick(*forms).replace(".alias()", "[...]")


def routed(g):
    """What a mixture of experts does with tokens: scores, a choice, permutations, each expert's product."""
    name = g.tensor(lambda t: t.dim() in (2, 3) and of_rows(t))
    if name is None:
        return None
    x, y, i = inner(g, name), g.fresh(), g.fresh("i")
    rows = f"{name}.reshape(-1, {name}.shape[-1])"
    forms = [f"{y} = {x}.topk(4, -1)[0]", f"{y} = {x}.sort(-1, descending=True)[0]"]
    forms += [f"{y} = {x}.gather(-1, {name}.topk(8, -1)[1])", f"{y} = {x}.sort(1, stable=True)[0]"]
    forms += [f"{y} = {rows}[{rows}.sum(-1).argsort()]", f"{y} = {rows}.index_select(0, {rows}.argmax(0))"]
    forms += [f"{y} = F.embedding(torch.randint(0, 8, (64,)), {g.leaf((8, 32))}).sum(0, keepdim=True)"]
    forms += [f"{y} = {rows}.repeat_interleave(2, 0)", f"{y} = {x}.topk(4, -1)[0].softmax(-1)"]
    if g.names[name].dtype == torch.float32 and not g.autocast() and g.chance(0.6):
        t = g.names[name]
        width, tokens = t.shape[-1], t.numel() // t.shape[-1]
        if width % 4 == 0 and tokens:
            ends = sorted(g.rng.randint(0, tokens) for _ in range(2))
            # to the last row of any step: behind it, the product is not written
            if not g.add(f"{i} = torch.tensor({[*ends, 1 << 20]}).clamp(max={rows}.shape[0]).int()"):
                return None
            weights = g.leaf((3, width, g.pick(16, 32, 48)))
            return f"{y} = F.grouped_mm({rows}, {weights}, offs={i})"
    return g.pick(*forms)


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
    forms += [f"{y} = torch.where({name} > 0, {name}, {other})", f"{y} = {name} + {inner(g, other)}"]
    return g.pick(*forms)


def scale(g):
    name = g.tensor()
    if name is None:
        return None
    t, x, y = g.names[name], inner(g, name), g.fresh()
    forms = [f"{y} = {x}.abs()", f"{y} = {x}.clamp(-0.5, 0.5)", f"{y} = {x}.clamp(min=0.1).log()"]
    forms += [f"{y} = {x}.exp()", f"{y} = {x}.abs().sqrt()", f"{y} = {x}.clamp(max=0.5)"]
    forms += [f"{y} = {x} * 0.7", f"{y} = F.dropout({x}, 0.3)", f"{y} = {x} / 3", f"{y} = {x}.square()"]
    dtype, axis = g.pick("", "", ", dtype=torch.float64", ", dtype=torch.float32"), g.pick(1, -1, 0)
    forms += [f"{y} = {x}.mean({axis}, keepdim=True{dtype}).float()", f"{y} = {x}.sum({axis}{dtype}).float()"]
    forms += [f"{y} = {name} * {x}.mean({axis}, keepdim=True{dtype}).to({name}.dtype)"]
    if of_channels(t) and t.dim() == 4:
        forms += [
            f"{y} = {x} * {g.leaf((t.shape[1],))}.view(-1, 1, 1)",
            f"{y} = F.prelu({x}, {g.leaf((1,))})",
        ]
        forms += [f"{y} = F.max_pool2d({x}, 2)", f"{y} = F.avg_pool2d({x}, 2)", f"{y} = F.pad({x}, (0, 1))"]
        forms += [f"{y} = F.interpolate({x}, scale_factor=2)", f"{y} = F.adaptive_avg_pool2d({x}, 4)"]
        modes = "nearest", "nearest-exact", "bilinear", "bicubic"
        forms += [f"{y} = F.interpolate({x}, scale_factor=2, mode={g.pick(*modes)!r})"]
        forms += [f"{y} = F.pixel_shuffle({x}, 2)", f"{y} = F.avg_pool2d({x}, 3, 1, 1)"]
        forms += [f"{y} = F.max_pool2d({x}, 3, 1, 1)", f"{y} = F.dropout2d({x}, 0.3)"]
        forms += [f"{y} = {x} * {x}.mean((2, 3), keepdim=True).sigmoid()", f"{y} = F.glu({x}, 1)"]
    if t.dim() == 5:
        modes = "nearest", "nearest-exact", "trilinear"
        forms += [f"{y} = F.interpolate({x}, scale_factor=2, mode={g.pick(*modes)!r})"]
        forms += [
            f"{y} = F.max_pool3d({x}, 2)",
            f"{y} = F.avg_pool3d({x}, 2)",
            f"{y} = F.dropout3d({x}, 0.3)",
        ]
    if of_rows(t):
        forms += [f"{y} = {x} * {g.leaf((t.shape[-1],))}", f"{y} = {x} + {g.leaf((t.shape[-1],))}"]
    return g.pick(*forms)


def user_function(g):
    name = g.tensor()
    if name is None:
        return None
    if g.chance(0.1):
        return f"{g.fresh()}, {g.fresh()} = Halves.apply({name})"
    if g.chance(0.15):
        own = g.pick(*ELEMENTWISE, "({} * 1.0)").replace("{}", name)  # nobody else reads it
        return f"{g.fresh()} = " + g.pick(f"doubled_sin({own})", f"forked({inner(g, name)})")
    return f"{g.fresh()} = {g.pick(*_USERS)}.apply({inner(g, name)})"


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
    t, inner = g.names[name], g.pick(*ELEMENTWISE).replace("{}", "a")
    if of_channels(t) and t.dim() == 4 and g.chance(0.5):
        inner = f"F.conv2d({inner}, {weight(g, (8, t.shape[1], 1, 1), t.dtype)})"
    elif of_rows(t) and g.chance(0.5):
        inner = f"F.layer_norm({inner}, ({t.shape[-1]},))"
    return f"{g.fresh()} = checkpoint(lambda a: {inner}, {name}, use_reentrant={g.pick(True, False)})"


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


def made_elsewhere(g):
    name = g.rng.choice(g.leaves()) if g.chance(0.6) and g.leaves() else g.tensor()
    form = name and g.pick(*COPIES, *ELEMENTWISE).replace("{}", "a")
    count = g.pick("", ", 50", ", 1000")
    made = f"elsewhere(lambda a: {form}, {name}{count})"
    if name in g.leaves() and g.chance(0.5):
        y = g.fresh()
        return f"{y} = cached({y!r}, lambda: {made})"
    return name and f"{g.fresh()} = {made}"


def transform(g):
    name = g.tensor(lambda t: t.dtype != torch.bfloat16)
    form = g.pick(*ELEMENTWISE).replace("{}", "a")
    return name and f"{g.fresh()} = {g.pick('gradient_of', 'tangent_of')}(lambda a: {form}, {name})"


def setting(g):
    forms = "flush({})", 'precision("bf16" if {} else "none")', 'precision("tf32" if {} else "none")'
    return g.pick(*forms, "only_warns({})").format(g.pick("i % 2", "not i", "i == 1"))


def other_data(g):
    return meanwhile.other_data(g, layer)


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
    layer: 18,
    product: 4,
    routed: 4,
    view: 7,
    combine: 7,
    scale: 6,
    user_function: 3,
    log: 3,
    part_in_checkpoint: 2,
    hidden_edit: 4,
    visible_edit: 2,
    leaf_edit: 1,
    cached: 2,
    made_elsewhere: 2,
    transform: 2,
    setting: 1,
    other_data: 2,
    meanwhile.shared_weight: 2,
    meanwhile.branch_of_its_own: 1,
    stop: 1,
    forget: 1,
}
