"""What `lean()` once had wrong, as programs; and where it may refuse in place of being right."""

from programs.listings_trains import TRAINS

KNOWN = {
    "a copy of a weight is overwritten": """
        n=4,4 s=6,6
        before:
            w = parameter(64, 64)
        forward:
            v = leaf(64, 64)
            with lean("norm"):
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
            with lean("norm"):
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
            with lean("norm"):
                one = F.conv2d(F.batch_norm(x * 1.0, None, None, g, g, True), w).sum()
            with lean("norm"):
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
            with lean("norm"):
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
            with lean("norm"):
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
            with lean("norm"):
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
            with lean("norm"):
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
            with lean("norm"):
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
            with lean("norm"):
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
                with lean("norm"):
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
            with lean("norm"):
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
            with lean("norm"):
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
            with lean("norm"):
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
            model = make_lean(Body(), "norm")
        forward:
            x = leaf(n, 8, s, s)
            with model:
                interrupt(i == 1, x)
                loss = F.silu(x.sin()).square().mean()
        backward:
            loss.backward()
    """,
    "a copy of what is in no usual layout": """
        n=4,4 s=11,11
        forward:
            x = leaf(n, 16, s, s)
            with lean("norm"):
                loss = F.hardswish(x.mT.clone()).square().mean()
        backward:
            loss.backward()
    """,
    "a view of a weight, between two backward passes": """
        n=5,5 s=7,7 forwards=2
        before:
            w = parameter(16, 8, 3, 3)
            v = w.mT
        forward:
            with lean("norm"):
                y = v * 1
                loss = (y * y).sum()
        backward:
            loss.backward()
            sgd(1.0)
    """,
    "a tensor that waits in one lean() and is packed in another": """
        n=4,4 s=9,9
        before:
            saver = lean("norm")
            w = parameter(64, dtype=torch.bfloat16)
        forward:
            x = tensor(n, s, 64, dtype=torch.bfloat16)
            with saver:
                y = F.rms_norm(x, (64,), w)
                with lean("norm"):
                    z = F.relu(y) / 3
                    log = z.float().norm()
                loss = (z @ z.mT).float().square().mean()
        backward:
            loss.backward()
    """,
    "an edit through .data of a tensor that was made outside": """
        n=4,4 s=6,6
        before:
            w = parameter(64)
        forward:
            x = leaf(n, s, 64)
            y = x + w
            with lean("conv"):
                z = F.silu(y)
                if i: y.data.mul_(2)
                loss = F.silu(y).square().sum()
        backward:
            loss.backward()
    """,
    **TRAINS,
}
FAIRLY_REFUSED = {
    "a view of a weight, between two backward passes": ["refused"],
    "an edit through .data of a tensor that was made outside": ["refused"],
    "a weight edited after it was cast": ["refused"],
    "a parameter edited through .data, under autocast": ["refused"],
    "a parameter edited through .data, with a rebuilt convolution": ["refused"],
    "an edit through .data between two readers": ["refused"],
}
