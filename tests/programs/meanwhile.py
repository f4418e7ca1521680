"""Lines of programs in which something is other for a while: a leaf's data, a call's bias, the branch."""

from __future__ import annotations

import re

from programs.norms import of_channels
from programs.parts import ELEMENTWISE


def other_data(g, layer):
    """A layer, or what is made of a leaf, while the leaf has other data."""
    text = layer(g)
    if text is None or (g.chance(0.3) and g.leaves()):
        name = g.rng.choice(g.leaves()) if g.leaves() else None
        form = g.pick("{}.to(torch.bfloat16)", "{} * 1", "{}.double()", "{} - {}.mean()", "{}.mT * 1")
        text = name and f"{g.fresh()} = {form.replace('{}', name)}"
    leaves = sorted({name for name in re.findall(r"\bw\d+\b", text or "") if name in g.run.shared})
    if not leaves:
        return None
    with g.block(f"with swapped({g.pick('i', 'i', 'i > 1', 'True')}, {', '.join(leaves)}):"):
        g.add(text)
    return None


def shared_weight(g):
    """Two calls of one weight that is made, with biases of their own."""
    name = g.tensor(lambda t: t.dim() == 4 and of_channels(t) and t.requires_grad)
    if name is None:
        return None
    t, made = g.names[name], g.fresh()
    weight = g.leaf((8, t.shape[1], 1, 1), t.dtype)
    biases = [g.leaf((8,), t.dtype, ("frozen", "buffer"), "b") for _ in range(2)]
    if g.chance(0.7):
        for bias in biases:
            g.set_up(f"{bias}.data.zero_()")
    lines = [f"{made} = {weight} - {weight}.mean()"]
    lines += [f"if i: {biases[1]}.data.add_(0.1)"] if g.chance(0.5) else []
    for bias in biases:
        lines.append(f"{g.fresh()} = convolved({name}, {made}, {bias})")
    y = lines[-1].split(" ")[0]
    return [*lines, f"{g.fresh()} = " + g.pick(*ELEMENTWISE).replace("{}", y)]


def branch_of_its_own(g):
    """What is saved by a branch that no loss reads, an activation, and an edit that torch allows then."""
    name = g.tensor(lambda t: t.requires_grad and not t.is_leaf)
    if name is None:
        return None
    log = f"{g.fresh('log')} = " + g.pick("{}.square().mean()", "{}.float().norm()", "{}.sin().sum()")
    reader = f"{g.fresh()} = " + g.pick("F.relu({})", "torch.tanh({})", "F.relu({} * 0.5)", "{}.sigmoid()")
    lines = [log.replace("{}", name), reader.replace("{}", name)]
    g.rng.shuffle(lines)
    edits = "{}.mul_(0.5)", "{} += 0.25", "{}[:, 0] = 0", "{}.clamp_(max=0.3)"
    return [*lines, *([g.pick(*edits).replace("{}", name)] if g.chance(0.6) else [])]
