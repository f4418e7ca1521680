"""Frozen norms in the trainers that people use: a hundred steps later every byte is as it was."""

from importlib.util import find_spec

import pytest
import torch
from test_freeze import assert_same, bytes_of, network
from torch import nn as stock

import leannorm
from benchmarks.architectures import import_torchvision
from leannorm import nn

NORMS = {"ours": nn.BatchNorm2d, "torch": stock.BatchNorm2d}
each_norm = pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)


def needs(package):
    return pytest.mark.skipif(find_spec(package) is None, reason=f"needs {package}")


def data(n=200):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(n, 3, 8, 8, generator=generator), torch.randn(n, 2, generator=generator)


def assert_frozen(model, before, first):
    assert_same(bytes_of(model), before)
    assert not torch.equal(model[0].weight, first)  # the rest has trained
    x = torch.randn(4, 3, 8, 8)
    assert torch.equal(model.train()(x), model.eval()(x))


def frozen(norm):
    model = leannorm.freeze(network(norm))
    return model, bytes_of(model), model[0].weight.clone()


@needs("lightning")
@pytest.mark.filterwarnings("ignore")
@each_norm
def test_lightning(norm):
    import_torchvision()
    import lightning

    model, before, first = frozen(norm)

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = model

        def training_step(self, batch, _):
            return (self.model(batch[0]) - batch[1]).square().mean()

        def validation_step(self, batch, _):
            return (self.model(batch[0]) - batch[1]).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 1e-3, momentum=0.9, weight_decay=0.1)

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(accelerator="cpu", max_epochs=2, enable_model_summary=False, **quiet)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*data()), batch_size=4)
    trainer.fit(Module(), loader, loader)
    assert trainer.global_step == 100
    assert_frozen(model, before, first)


@needs("timm")
@each_norm
def test_timm_with_an_average_of_the_weights(norm):
    import_torchvision()
    from timm.optim import create_optimizer_v2
    from timm.utils import ModelEmaV3

    model, before, first = frozen(norm)
    average = ModelEmaV3(model, decay=0.9)
    optimizer = create_optimizer_v2(model, "sgd", lr=1e-3, momentum=0.9, weight_decay=0.1)
    x, y = data()
    for i in range(100):
        model.train()
        a = slice(2 * i, 2 * i + 2)
        optimizer.zero_grad()
        (model(x[a]) - y[a]).square().mean().backward()
        optimizer.step()
        average.update(model, step=i)
    assert_frozen(model, before, first)
    average.module.train()
    assert not any(m.training for m in average.module.modules() if isinstance(m, norm))
    for (name, one), (_, other) in zip(bytes_of(average.module), before, strict=True):
        torch.testing.assert_close(one, other, msg=name)


@needs("transformers")
@pytest.mark.filterwarnings("ignore")
@each_norm
def test_transformers(norm, tmp_path):
    import_torchvision()
    from transformers import Trainer, TrainingArguments

    model, before, first = frozen(norm)

    class Scored(stock.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, pixels, labels):
            y = self.model(pixels)
            return {"loss": (y - labels).square().mean(), "logits": y}

    x, y = data()
    rows = [{"pixels": a, "labels": b} for a, b in zip(x, y, strict=True)]
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=4,
        num_train_epochs=2,
        learning_rate=1e-2,
        weight_decay=0.1,
        save_strategy="no",
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(Scored(), arguments, train_dataset=rows)
    trainer.train()
    assert trainer.state.global_step == 100
    assert_frozen(model, before, first)
