"""A checkpoint with batch norms, folded and exported to ONNX: the same outputs?"""

import numpy as np
import onnx
import onnxruntime
import torch
from torch import nn

import leannorm


def network():
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.BatchNorm2d(32),
        nn.SiLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )


def save_checkpoint():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(8, 3, 32, 32) * 2 + 1).square().mean().backward()
        optimizer.step()
    torch.save(model.state_dict(), "checkpoint.pt")


torch.manual_seed(0)
save_checkpoint()

model = network()
model.load_state_dict(torch.load("checkpoint.pt"))
model.eval()
images = torch.randn(4, 3, 32, 32)
report = leannorm.fold(model, (images,))
report.print()
torch.onnx.export(report.model, (images,), "folded.onnx", dynamo=True, verbose=False)

session = onnxruntime.InferenceSession("folded.onnx")
(outputs,) = session.run(None, {session.get_inputs()[0].name: images.numpy()})
expected = model(images).detach().numpy()
difference = np.abs(outputs - expected).max() / np.abs(expected).max()
print("operators:", *sorted({node.op_type for node in onnx.load("folded.onnx").graph.node}))
print(f"largest difference {difference:.1e} of the largest output")
