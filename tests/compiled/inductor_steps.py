"""A fresh process that compiles one model with inductor under several settings, and tells what each saved.

python inductor_steps.py '[null, {"budget": 0.5}]'      # null: torch's own choice
"""

import json
import sys

import torch
from compiling import Scaled, step
from torch import nn
from torch._dynamo.utils import counters
from torch.nn import functional as F

import leannorm


class Small(nn.Module):
    """Three layers, and a buffer that the forward pass edits after it was used."""

    def __init__(self):
        super().__init__()
        self.first, self.scaled, self.last = nn.Linear(16, 64), Scaled(64), nn.Linear(64, 16)

    def forward(self, x):
        return self.last(self.scaled(F.silu(self.first(x))))


def main():
    told = []
    for how in json.loads(sys.argv[1]):
        torch.manual_seed(0)
        model = Small().double()
        x = torch.randn(32, 16, dtype=torch.float64)
        eager = step(model, model, x)
        model.scaled.scale.fill_(1)
        options = leannorm.compile_options(**how)
        before = counters["aot_autograd"]["autograd_cache_hit"]
        ours = step(model, torch.compile(model, options=options), x)
        largest = max(float(g.abs().max()) for g in eager.gradients.values())
        off = max(float((ours.gradients[k] - v).abs().max()) for k, v in eager.gradients.items())
        report = options.report()
        told.append(
            {
                "saved": ours.saved,
                "hits": counters["aot_autograd"]["autograd_cache_hit"] - before,
                "error": off / largest,
                "buffers": all(torch.equal(ours.buffers[k], v) for k, v in eager.buffers.items()),
                "reasons": report.reasons,
                "planned": report.held,
                "stock": report.stock_held,
            }
        )
    print(json.dumps(told))


if __name__ == "__main__":
    main()
