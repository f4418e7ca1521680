"""Programs that plain torch trains, and at which `lean()` once raised, or was off; a part of `KNOWN`."""

TRAINS = {
    "a leaf that has other data while it is read": """
        n=4,4,4,4 s=6,6,6,6
        before:
            w = parameter(64, 64)
            b = parameter(64)
        forward:
            x = tensor(n, s, 64)
            with lean("conv"):
                with swapped(i > 2, w, b):
                    y = F.linear(x, w, b)
                    z = w.to(torch.bfloat16)
                loss = torch.sin(y.bfloat16() @ z).float().square().mean() + F.silu(y).mean()
        backward:
            loss.backward()
            sgd(0.1)
    """,
    "two calls of one weight, with biases of their own": """
        n=4,4,4,4,4 s=16,16,16,16,16
        before:
            w = parameter(8, 8, 1, 1)
            a = buffer(8)
            b = buffer(8)
            a.zero_()
            b.zero_()
        forward:
            x = leaf(n, 8, s, s)
            y = leaf(n, 8, s, s)
            if i > 2: b.add_(0.01)
            with lean("conv"):
                v = w - w.mean()
                x1 = convolved(x, v, a)
                y1 = convolved(y, v, b)
                loss = F.silu(x1).square().mean() + F.silu(y1).square().mean()
        backward:
            loss.backward()
    """,
    "what a dead branch has saved": """
        n=4,4,4 s=9,9,9
        before:
            w = parameter(64, 64)
            v = parameter(64, 64)
        forward:
            x = leaf(n, s, 64)
            with lean("norm"):
                h = x @ w
                log = h.norm()
                y = F.relu(h)
                h += y @ v
                loss = (h @ v).square().mean()
        backward:
            loss.backward()
    """,
    "what a loss has saved whose backward pass is done": """
        n=4,4,4 s=9,9,9
        before:
            w = parameter(64, 64)
            v = parameter(64, 64)
        forward:
            x = leaf(n, s, 64)
            with lean("norm"):
                h = x @ w
                y = F.relu(h)
                log = h.norm()
                loss = (y @ v).square().mean()
        backward:
            log.backward(retain_graph=True)
            h.mul_(2)
            loss.backward()
    """,
    "a custom operator that writes into what it has saved": """
        n=4,4,4 s=9,9,9
        before:
            w = parameter(64)
        forward:
            x = leaf(n, s, 64)
            with lean("norm"):
                h = F.layer_norm(x * 1.0, (64,))
                log = h.norm()
                loss = (F.relu(h) * w + doubled_sin(h)).square().mean()
                del h
        backward:
            loss.backward()
    """,
    "a part in a thread of torch's own": """
        n=4,4,4 s=9,9,9
        before:
            small_passes(30_000)
        forward:
            x = leaf(n, s, 64)
            with lean("norm"):
                y = forked(F.silu(x))
                loss = y.square().mean()
        backward:
            loss.backward()
    """,
    "contexts that close in the order in which they opened": """
        n=4,4,8 s=9,9,9
        before:
            small_passes(30_000)
        forward:
            x = leaf(n, s, 64)
            with taking_turns(lean("norm"), lean("conv")):
                y = F.silu(F.layer_norm(x, (64,)))
            loss = F.silu(y).square().mean()
        backward:
            loss.backward()
    """,
    "leaves that become others behind the same objects": """
        n=4,4,4 s=9,9,9
        before:
            w = parameter(64, 64)
            b = parameter(64)
        forward:
            x = tensor(n, s, 64)
            with lean("conv"):
                loss = F.silu(F.linear(x, w, b)).square().mean()
        backward:
            loss.backward()
            sgd(0.1)
            del loss
            exchanged(w)
            exchanged(b)
    """,
    "a pass that opens without grad": """
        n=4,4,4 s=16,16,16
        before:
            w = parameter(8, 8, 3, 3)
            g = parameter(8)
        forward:
            x = leaf(n, 8, s, s)
            with torch.no_grad():
                with lean("norm"):
                    with torch.enable_grad():
                        y = F.conv2d(F.silu(F.group_norm(F.conv2d(x, w), 2, g, g)), w)
                        loss = y.square().mean()
        backward:
            loss.backward()
    """,
}
