"""Programs on which the fuzzer itself could be wrong: what it must not call a failure, and must not make."""

SAME = {
    "gradients of a backward pass that raises": """
        n=3 s=11
        before:
            w = parameter(48, 48)
        forward:
            x = leaf(n, 16, s, s)
            with lean(budget=0.7):
                loss = (w @ w).sin().sum() + torch.tanh(x).sum()
        backward:
            with torch.no_grad(): w.mul_(1.5)
            loss.backward()
    """,
    "a leaf's .data edit where stock raises for another reason": """
        n=5 s=11
        before:
            w = parameter(16)
        forward:
            x = leaf(n, 8, s, s)
            with lean("norm"):
                y = torch.sigmoid(x)
                y.mul_(1.5)
                loss = y.mean() + w.square().mean()
        backward:
            w.data.mul_(1.5)
            loss.backward()
    """,
    "gradients of a backward pass that raises, and is told to go on": """
        n=4 s=9
        before:
            w = parameter(48, 48)
        forward:
            x = leaf(n, 8, s, s, dtype=torch.bfloat16)
            with lean("norm"):
                y = x.sqrt()
                y.sigmoid_()
                z = w.to(w.dtype, copy=True) @ w
                loss = z.sum() + y.mean()
        backward:
            w.data.mul_(1.5)
            with suppressed():
                loss.backward(retain_graph=True)
    """,
    "a step by gradients of a backward pass that raises, and is told to go on": """
        n=3 s=5 forwards=2
        before:
            w = parameter(16, 8, 1, 1)
            v = parameter(8, 16, 3, 3)
        forward:
            x = tensor(n, 8, s, s)
            with lean("norm"):
                y = F.conv2d(x, w, None)
                z = v.to(v.dtype, copy=True)
                loss = y.sum() + z.square().mean()
        backward:
            with suppressed():
                loss.backward()
            sgd(1.0)
    """,
    "memory that torch's recomputation of a checkpoint does not fill": """
        n=4 s=7
        forward:
            x = leaf(n, 8, s, s)
            y = checkpoint(lambda a: F.rrelu(a, training=True), x, use_reentrant=False)
            loss = y.mean()
        backward:
            with deterministic(False):
                loss.backward()
    """,
}
UNSEEN = {
    "between a norm and an activation that saves its output": """
        n=4 s=6
        forward:
            x = leaf(n, 8, s, s)
            with lean("norm"):
                y = F.batch_norm(x, None, None, None, None, True)
                with torch.no_grad(): y.clamp_(max=0.1)
                loss = F.relu(y).mean()
        backward:
            loss.backward()
    """,
    "through .data of what is not saved again": """
        n=4 s=6
        forward:
            x = leaf(n, 8, s, s)
            with lean("norm"):
                y = F.silu(x)
                z = y.square()
                y.data.mul_(2)
                loss = F.relu(y).mean() + z.mean()
        backward:
            loss.backward()
    """,
    "through a detached tensor": """
        n=4 s=6
        forward:
            x = leaf(n, 8, s, s)
            with lean("norm"):
                y = F.silu(x)
                t = y.detach()
                t.mul_(2)
                loss = F.relu(y).mean()
        backward:
            loss.backward()
    """,
    "in a block under no_grad": """
        n=4 s=6
        forward:
            x = leaf(n, 8, s, s)
            with lean("norm"):
                y = F.batch_norm(x, None, None, None, None, True)
                with torch.no_grad():
                    y.clamp_(max=0.1)
                loss = F.relu(y).mean()
        backward:
            loss.backward()
    """,
    "of what only a detached tensor was saved of": """
        n=3,3 s=7,7
        forward:
            x = leaf(n, 8, s, s)
            with lean("norm"):
                y = x * 1.0
                if i: y.detach().mul_(2)
                z = y * y.detach()
                loss = z.sin().sum()
        backward:
            loss.backward()
    """,
    "of the data of what nobody saved, behind views of which one was edited": """
        n=5,5 s=7,7
        forward:
            x = leaf(n, s, 48)
            a, b = x.chunk(2, 1)
            with torch.no_grad(): a.add_(0.5)
            with lean("norm"):
                y = F.logsigmoid(x)
                if i: y.data.mul_(2)
                loss = y.square().mean()
        backward:
            loss.backward()
    """,
}
