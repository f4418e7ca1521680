"""Programs that were written down: what `lean()` once had wrong, and what the fuzzer must tell apart."""

KNOWN = {
    "a copy of a weight is overwritten": """
        n=4,4 s=6,6
        before:
            w = parameter(64, 64)
        forward:
            v = leaf(64, 64)
            with lean():
                loss = (torch.relu(w.to(w.dtype, copy=True)) @ v).sum()
        backward:
            loss.backward()
    """,
    "a copy of a tensor in the middle is overwritten": """
        n=4,4 s=6,6
        before:
            w = parameter(64, 64)
        forward:
            v = leaf(64, 64)
            with lean():
                y = w.sin()
                z = y.square()
                loss = (torch.relu(y.to(y.dtype, copy=True)) @ v).sum() + z.sum()
        backward:
            loss.backward()
    """,
    "batch norm with a bias and no weight": """
        n=4 s=16
        before:
            w = parameter(8, 8, 3, 3)
            g = parameter(8)
            b = buffer(8)
        forward:
            x = leaf(n, 8, s, s)
            with lean():
                one = F.conv2d(F.batch_norm(x * 1.0, None, None, g, g, True), w).sum()
            with lean():
                two = F.conv2d(F.batch_norm(x * 1.0, None, None, None, b, True), w).square().sum()
        backward:
            (one + two).backward()
    """,
    "group norm with a bias and no weight": """
        n=4 s=16
        before:
            w = parameter(8, 8, 3, 3)
            g = parameter(8)
            b = buffer(8)
        forward:
            x = leaf(n, 8, s, s)
            with lean():
                one = F.conv2d(F.group_norm(x * 1.0, 2, g, g), w).sum()
                two = F.conv2d(F.group_norm(x * 1.0, 2, None, b), w).square().sum()
        backward:
            (one + two).backward()
    """,
    "instance norm with a bias and no weight": """
        n=4 s=16
        before:
            w = parameter(8, 8, 3, 3)
            g = parameter(8)
            b = frozen(8)
        forward:
            x = leaf(n, 8, s, s)
            with lean():
                one = F.conv2d(F.instance_norm(x * 1.0, None, None, g, g), w).sum()
                two = F.conv2d(F.instance_norm(x * 1.0, None, None, None, b), w).square().sum()
        backward:
            (one + two).backward()
    """,
    "a frozen bias in evaluation": """
        n=4 s=16
        before:
            w = parameter(8, 8, 3, 3)
            m = buffer(8)
            v = positive(8)
            g = parameter(8)
            b = frozen(8)
        forward:
            x = leaf(n, 8, s, s)
            with lean():
                one = F.conv2d(F.batch_norm(x * 1.0, m, v, g, g), w).sum()
                two = F.conv2d(F.batch_norm(x * 1.0, m, v, None, b), w).square().sum()
        backward:
            (one + two).backward()
    """,
    "autocast around the loop": """
        n=4,4,4 s=9,9,9
        around: autocast()
        before:
            w1 = parameter(64, 64)
            w2 = parameter(64, 64)
        forward:
            x = leaf(n, s, 64)
            with lean():
                loss = F.linear(F.relu(F.linear(x, w1)), w2).float().square().mean()
        backward:
            loss.backward()
            sgd(1.0)
    """,
    "a weight edited after it was cast": """
        n=4,4,4 s=9,9,9
        before:
            w = parameter(64, 64)
        forward:
            v = leaf(64, 64, dtype=torch.bfloat16)
            with lean():
                h = w.to(torch.bfloat16)
                if i: w.detach().mul_(3)
                loss = (h @ v).sum()
        backward:
            loss.backward()
    """,
    "a weight cast before the loop": """
        n=4,4,4 s=9,9,9
        before:
            w = parameter(64, 64)
            h = w.to(torch.bfloat16)
        forward:
            v = leaf(64, 64, dtype=torch.bfloat16)
            with lean():
                loss = (h @ v).float().square().mean()
        backward:
            loss.backward()
            sgd(1.0)
    """,
    "a parameter edited through .data, under autocast": """
        n=4,4 s=9,9
        before:
            w = parameter(64, 64)
        forward:
            x = leaf(n, s, 64)
            with autocast():
                with lean():
                    loss = F.linear(x, w).float().square().mean()
        backward:
            w.data.mul_(2)
            loss.backward()
    """,
    "a parameter edited through .data, with a rebuilt convolution": """
        n=4,4 s=9,9
        before:
            w = parameter(8, 8, 3, 3)
            v = parameter(8, 8, 1, 1)
        forward:
            x = leaf(n, 8, s, s)
            with lean("conv"):
                loss = F.conv2d(F.conv2d(x, w), v).square().mean()
        backward:
            w.data.mul_(2)
            loss.backward()
    """,
    "an edit under no_grad of what an activation made": """
        n=4,4 s=16,16
        before:
            w = parameter(8, 8, 3, 3)
        forward:
            x = leaf(n, 8, s, s)
            with lean():
                y = F.silu(x.clone())
                if i: y.detach().clamp_(max=0.1)
                loss = F.conv2d(y, w).square().sum()
        backward:
            loss.backward()
    """,
    "an edit through .data between two readers": """
        n=4,4 s=16,16
        before:
            w = parameter(8, 8, 3, 3)
        forward:
            x = leaf(n, 8, s, s)
            with lean():
                y = F.relu(x * 1.0)
                z = F.conv2d(y, w)
                y.data.mul_(2)
                loss = (z + F.conv2d(y, w)).square().sum()
        backward:
            loss.backward()
    """,
    "flags of the forward pass": """
        n=4,4 s=16,16
        before:
            w = parameter(8, 8, 3, 3)
        forward:
            x = leaf(n, 8, s, s)
            with lean("conv"):
                with mkldnn(i == 0):
                    y = F.conv2d(x, w)
                loss = F.conv2d(y, w).square().sum()
        backward:
            loss.backward()
    """,
    "a logged tensor that is edited": """
        n=4,4 s=16,16
        before:
            w = parameter(8, 8, 3, 3)
        forward:
            x = leaf(n, 8, s, s)
            with lean():
                y = F.conv2d(x, w)
                log = y.square().mean()
                loss = F.conv2d(F.relu(y, inplace=True), w).square().sum()
        backward:
            loss.backward()
    """,
    "a user's function that is called ConvNorm": """
        n=4,4 s=16,16
        before:
            w = parameter(8, 8, 3, 3)
        forward:
            x = leaf(n, 8, s, s)
            with lean("conv"):
                loss = F.conv2d(ConvNorm.apply(x), w).square().sum()
        backward:
            loss.backward()
    """,
    "an interrupted forward pass of a lean model": """
        n=4,4,4 s=16,16,16
        before:
            model = make_lean(Body())
        forward:
            x = leaf(n, 8, s, s)
            with model:
                interrupt(i == 1, x)
                loss = F.silu(x.sin()).square().mean()
        backward:
            loss.backward()
    """,
}
FAIRLY_REFUSED = {
    "a weight edited after it was cast": ["refused"],
    "a parameter edited through .data, under autocast": ["refused"],
    "a parameter edited through .data, with a rebuilt convolution": ["refused"],
    "an edit through .data between two readers": ["refused"],
}
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
            with lean():
                y = torch.sigmoid(x)
                y.mul_(1.5)
                loss = y.mean() + w.square().mean()
        backward:
            w.data.mul_(1.5)
            loss.backward()
    """,
}
UNSEEN = {
    "between a norm and an activation that saves its output": """
        n=4 s=6
        forward:
            x = leaf(n, 8, s, s)
            with lean():
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
            with lean():
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
            with lean():
                y = F.silu(x)
                t = y.detach()
                t.mul_(2)
                loss = F.relu(y).mean()
        backward:
            loss.backward()
    """,
}
