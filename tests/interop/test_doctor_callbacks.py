"""`doctor` behind the doors of trainers: it runs once before training, and training is as without it."""

import pickle
import sys
from importlib.util import find_spec

import pytest
import torch
from torch import nn

from leannorm import MissingDependencyError
from leannorm.interop import lightning as ours_for_lightning
from leannorm.interop import transformers as ours_for_transformers

needs_transformers = pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")
needs_lightning = pytest.mark.skipif(find_spec("lightning") is None, reason="needs Lightning")


def images():
    random = torch.Generator().manual_seed(1)
    return torch.randn(24, 3, 8, 8, generator=random), torch.arange(24) % 2


class Images(torch.utils.data.Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, i):
        x, y = images()
        return {"pixels": x[i], "labels": y[i]}


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(
            nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4, momentum=0.99), nn.Dropout()
        )
        self.head = nn.Linear(144, 2)
        self.body[1].requires_grad_(False)

    def forward(self, pixels, labels=None):
        logits = self.head(self.body(pixels).flatten(1))
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits}


def told(report):
    return [(one.check, one.layer) for one in report.findings]


def same(a, b):
    return all(
        torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    )


def by_transformers(folder, *callbacks):
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=8,
        num_train_epochs=2,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        weight_decay=0.1,
        seed=3,
    )
    model = Classifier().eval()  # as from_pretrained gives it
    Trainer(model, arguments, train_dataset=Images(), callbacks=list(callbacks)).train()
    return model


@needs_transformers
@pytest.mark.filterwarnings("ignore")
def test_a_transformers_trainer(tmp_path, capsys):
    from benchmarks.architectures import import_torchvision

    import_torchvision()
    pixels, labels = images()
    callback = ours_for_transformers.doctor_callback([{"pixels": pixels, "labels": labels}])
    looked = by_transformers(tmp_path, callback)
    assert told(callback.report) == [("momentum", "body.1"), ("half_frozen", "body.1")]
    assert callback.report.batches == 1
    assert capsys.readouterr().out.count("half_frozen") == 1
    assert same(looked, by_transformers(tmp_path))


def test_without_transformers(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingDependencyError, match="pip install transformers"):
        ours_for_transformers.doctor_callback()


def by_lightning(folder, *callbacks):
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = Classifier()

        def training_step(self, batch, index):
            return self.model(*batch)["loss"]

        def forward(self, pixels):
            return self.model(pixels)["logits"]

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), 0.01, weight_decay=0.1)

    torch.manual_seed(0)
    module = Module()
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(*images()), batch_size=8, shuffle=True
    )
    trainer = lightning.Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
        default_root_dir=folder,
    )
    trainer.fit(module, loader)
    return module


@needs_lightning
@pytest.mark.filterwarnings("ignore")
def test_a_lightning_trainer(tmp_path, capsys):
    pixels, _ = images()
    callback = ours_for_lightning.doctor_callback(pixels)
    looked = by_lightning(tmp_path, callback)
    layer = "model.body.1"
    assert told(callback.report) == [("momentum", layer), ("half_frozen", layer)]
    assert callback.report.difference is not None
    assert capsys.readouterr().out.count("half_frozen") == 1
    assert same(looked, by_lightning(tmp_path))
    assert pickle.loads(pickle.dumps(ours_for_lightning.doctor_callback(3))).report is None
