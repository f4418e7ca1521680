"""Run by the test of Lightning in a process of its own, which Lightning starts a second time."""

import importlib.util
import json
import sys
from pathlib import Path

import torch
from lightning_network import network

from benchmarks.architectures import import_torchvision

if importlib.util.find_spec("torchvision"):
    import_torchvision()  # Lightning's metrics need it

import lightning

from leannorm.interop.lightning import layer_sync


class Regression(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = network()

    def training_step(self, batch, _):
        self.during = type(self.model[1]).__name__
        x, t = batch
        return (self.model(x) - t).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def main():
    torch.manual_seed(0)
    x, t = torch.randn(8, 3, 6, 6).double(), torch.randn(8, 4).double()
    module = Regression()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, t), batch_size=4)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=3,
        sync_batchnorm=True,
        plugins=[layer_sync()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader)
    bn = module.model[1]
    found = {
        "shared": module.during,
        "after": f"{type(bn).__module__}.{type(bn).__qualname__}",
        "var": bn.running_var.sum().item(),
        "weight": module.model[0].weight.sum().item(),
    }
    (Path(sys.argv[1]) / f"{trainer.global_rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
