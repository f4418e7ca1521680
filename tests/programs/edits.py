"""Lines that write into a tensor: seen by autograd, or hidden from it."""

from __future__ import annotations

from programs.norms import of_channels
from programs.parts import ELEMENTWISE, weight
from programs.run import is_leaf

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


def activation_in_place(g):
    name = g.tensor(lambda t: not is_leaf(t))
    form = g.pick(*_IN_PLACE).format(name)
    return name and (form if g.chance(0.5) else f"{g.fresh() if g.chance(0.5) else name} = {form}")


def hidden_edit(g):
    """With a reader behind it that saves what was edited."""
    name = g.tensor(lambda t: not is_leaf(t))
    if name is None:
        return None
    if g.chance(0.6):
        copied, name = g.pick("{}.clone()", "({} * 1.0)").format(name), g.fresh()
        if not g.add(f"{name} = " + g.pick(*ELEMENTWISE).replace("{}", copied)):
            return None
    step = g.pick("", "if i: ", "if i: ")  # a step that is tried first is trusted from then on
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
        readers += [f"{g.fresh()} = F.conv2d({name}, {weight(g, (8, c, 1, 1), g.names[name].dtype)})"] * 2
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
