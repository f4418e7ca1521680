"""A timm network in bfloat16, channels_last, with accumulated gradients and EMA: the same weights?"""

import sys

import timm
import torch
import torch.nn.functional as F
from timm.utils import ModelEmaV3

import leannorm

torch.manual_seed(0)
images = torch.randn(3, 2, 8, 3, 64, 64)  # 3 steps of 2 batches
labels = torch.randint(10, (3, 2, 8))


def train(lean):
    torch.manual_seed(0)
    model = timm.create_model("resnet18", num_classes=10).to(memory_format=torch.channels_last)
    if lean:
        model = leannorm.make_lean(model, "conv")
    averaged = ModelEmaV3(model, decay=0.9)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model.train()
    for step in range(3):
        for batch, wanted in zip(images[step], labels[step], strict=True):
            batch = batch.to(memory_format=torch.channels_last)
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.cross_entropy(model(batch), wanted) / 2
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        averaged.update(model, step=step)
    if lean:
        saved = model.forward.saved
        print(f"kept {saved.kept_bytes} bytes, rebuilt {saved.rebuilt_bytes}", *saved.reasons)
    return model.state_dict(), averaged.module.state_dict()


for ours, theirs, what in zip(train(True), train(False), ("weights", "averages"), strict=True):
    same = ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    print(f"{what}: {'equal bit for bit' if same else 'different'}")
    sys.exit(1) if not same else None
