"""Code that inductor makes, in loops of others: statistics, a checkpoint's random numbers, two trainers."""

from importlib.util import find_spec

import pytest
import torch
from compiling import Residual, images, step
from torch import nn
from torch.utils.checkpoint import checkpoint

import leannorm
from benchmarks.architectures import import_torchvision

pytestmark = [
    pytest.mark.conformance,
    pytest.mark.inductor,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore:`isinstance:FutureWarning"),  # Lightning's own
]


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    with torch._functorch.config.patch(enable_autograd_cache=False):  # what comes from there has no report
        yield
    torch._dynamo.reset()


class Drops(nn.Module):
    """Batch norms, and a part that a checkpoint runs again, dropout in it."""

    def __init__(self):
        super().__init__()
        self.first, self.last = Residual(), nn.Linear(8, 8)
        self.part = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.5), nn.Linear(32, 8))

    def forward(self, x):
        y = self.first(x).flatten(2).transpose(1, 2)
        return self.last(checkpoint(self.part, y, use_reentrant=False))


def test_statistics_move_once_and_a_checkpoint_draws_the_same_numbers():
    ran, options = [], leannorm.compile_options(budget=0.6)
    for chosen in (None, options):
        torch.manual_seed(0)
        model = Drops().double()
        ran.append(step(model, torch.compile(model, options=chosen), images(2, 8, 6, 6).double()))
    stock, ours = ran
    assert options.report().reasons == []
    assert ours.saved < stock.saved
    for name, gradient in stock.gradients.items():  # other numbers dropped would be another gradient
        torch.testing.assert_close(ours.gradients[name], gradient, rtol=1e-10, atol=1e-12)
    for name, buffer in stock.buffers.items():
        torch.testing.assert_close(ours.buffers[name], buffer, rtol=1e-10, atol=1e-12)


@pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")
def test_transformers_trainer(tmp_path):
    import_torchvision()
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 100}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1))
    before = model.model.layers[0].mlp.up_proj.weight.detach().clone()
    options = leannorm.compile_options("conv")
    model.compile(options=options)
    tokens = torch.randint(0, 100, (8, 40))
    data = [{"input_ids": row, "labels": row} for row in tokens]
    arguments = {"use_cpu": True, "report_to": [], "max_steps": 2, "per_device_train_batch_size": 4}
    Trainer(model, TrainingArguments(str(tmp_path), **arguments), train_dataset=data).train()
    assert not torch.equal(model.model.layers[0].mlp.up_proj.weight, before)
    assert options.report().held < 0.7 * options.report().stock_held


@pytest.mark.skipif(find_spec("lightning") is None, reason="needs Lightning")
def test_lightning(tmp_path):
    import_torchvision()
    import lightning

    class Net(nn.Sequential):
        def forward(self, x):
            return super().forward(x)

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Net(nn.Linear(16, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 4))
            self.options = leannorm.compile_options("conv")
            self.net.compile(options=self.options)

        def training_step(self, batch, index):
            return self.net(batch).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    module = Module()
    before = module.net[0].weight.detach().clone()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(accelerator="cpu", max_epochs=1, default_root_dir=tmp_path, **quiet)
    trainer.fit(module, torch.utils.data.DataLoader(torch.randn(32, 16), batch_size=16))
    assert not torch.equal(module.net[0].weight, before)
    assert module.options.report().held < module.options.report().stock_held
