"""Digits with Lightning: an unmodified `LightningModule`, and one callback.

    python examples/lightning_digits.py

Needs lightning and scikit-learn. The only difference is `callbacks=[lean_callback()]`.
"""

import with_torchvision as with_torchvision  # lightning imports torchvision

# isort: split
import logging
import tempfile
import warnings

import lightning
import torch
import torch.nn.functional as F
from digits import data, network
from measure import held, same_weights

from leannorm.interop.lightning import lean_callback


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.network = network()

    def training_step(self, batch, index):
        images, labels = batch
        return F.cross_entropy(self.network(images), labels)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def train(dataset, callbacks):
    lightning.seed_everything(0, verbose=False)
    model = Classifier()
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            max_epochs=1,
            callbacks=callbacks,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        trainer.fit(model, torch.utils.data.DataLoader(dataset, batch_size=250, shuffle=True))
    return model


def main():
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")  # it suggests more workers for the loader
    (images, labels), _ = data()
    dataset = torch.utils.data.TensorDataset(images, labels)
    callback = lean_callback()
    model = train(dataset, [])
    same_weights(model, train(dataset, [callback]))
    saved = callback.saved
    print(
        f"the last step kept {saved.kept_bytes / 1e6:.1f} MB and rebuilt {saved.rebuilt_bytes / 1e6:.1f} MB"
    )
    held(model, lambda: model.training_step((images[:250], labels[:250]), 0))


if __name__ == "__main__":
    main()
