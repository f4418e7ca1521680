"""`lean` behind the doors of trainers that are not edited: the weights of a run are stock's to the bit."""

import inspect
import sys
from importlib.util import find_spec

import pytest
import torch
from torch import nn

import leannorm
from benchmarks.architectures import import_torchvision
from leannorm import InputError, MissingDependencyError, make_lean
from leannorm.interop import lightning as ours_for_lightning
from leannorm.interop import transformers as ours_for_transformers

needs_transformers = pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")
needs_lightning = pytest.mark.skipif(find_spec("lightning") is None, reason="needs Lightning")


def assert_same(a, b):
    for (name, ours), theirs in zip(a.state_dict().items(), b.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs), name


# ------------------------------------------------ transformers


def llama():
    import_torchvision()
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 100}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1))


class Tokens(torch.utils.data.Dataset):
    def __init__(self):
        self.tokens = torch.randint(0, 100, (24, 40), generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, i):
        return {"input_ids": self.tokens[i], "labels": self.tokens[i]}


def trained(folder, callbacks, bf16):
    model = llama()
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        num_train_epochs=2,
        eval_strategy="epoch",
        save_strategy="epoch",
        bf16=bf16,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        seed=3,
    )
    tokens = Tokens()
    trainer = Trainer(model, arguments, train_dataset=tokens, eval_dataset=tokens, callbacks=callbacks)
    trainer.train()
    return model, trainer


@needs_transformers
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bfloat16"])
def test_a_trainer_is_lean(tmp_path, bf16):
    seen = []

    def pack(tensor):
        seen.append(tensor.nbytes)
        return tensor

    callback = ours_for_transformers.lean_callback(held=(pack, lambda tensor: tensor))
    model, _ = trained(tmp_path / "lean", [callback], bf16)
    stock, trainer = trained(tmp_path / "stock", [], bf16)
    assert seen  # it was at work
    assert callback.saved.rebuilt_bytes > 0
    assert "to rebuild" in repr(callback.saved)
    assert_same(model, stock)
    assert ("forward" in vars(model)) == ("forward" in vars(stock))  # accelerate's own, for bfloat16
    last = sorted((tmp_path / "lean").glob("checkpoint-*"))[-1]
    assert_same(type(model).from_pretrained(last), trainer.model)


@needs_transformers
@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"recompute": "everything"}, InputError),
        ({"recompute": "conv", "budget": 0.5}, InputError),
        ({"peak": 8}, InputError),
        ({"bugdet": 0.5}, TypeError),
    ],
    ids=str,
)
def test_settings_are_checked_when_the_callback_is_made(wrong, error):
    with pytest.raises(error, match=next(iter(wrong)) if error is TypeError else "recompute|peak"):
        ours_for_transformers.lean_callback(**wrong)


@pytest.mark.parametrize("callback", [ours_for_transformers.lean_callback, ours_for_lightning.lean_callback])
def test_a_callback_shows_the_settings_of_lean(callback):
    assert inspect.signature(callback).parameters == inspect.signature(leannorm.lean).parameters


def test_without_transformers(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingDependencyError, match="pip install transformers"):
        ours_for_transformers.lean_callback()


@needs_transformers
@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(find_spec("accelerate") is None, reason="needs accelerate")
def test_accelerate_prepares_a_lean_model():
    from accelerate import Accelerator

    results = []
    for around in (lambda model: model, make_lean):
        accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
        model = around(llama())
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        loader = torch.utils.data.DataLoader(Tokens(), batch_size=4)
        prepared, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for batch in loader:
            with accelerator.accumulate(prepared):
                accelerator.backward(prepared(**batch).loss)
                optimizer.step()
                optimizer.zero_grad()
        results.append(accelerator.unwrap_model(prepared))
    assert_same(*results)


# ------------------------------------------------ Lightning


def lightning_run(callbacks, manual=False):
    import_torchvision()
    import lightning

    class Classifier(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.SiLU(), nn.Flatten(), nn.LazyLinear(4)]
            self.model = nn.Sequential(*layers)
            self.model(torch.randn(2, 3, 12, 12))
            self.automatic_optimization = not manual

        def training_step(self, batch, _):
            x, t = batch
            loss = (self.model(x) - t).square().mean()
            if manual:
                self.optimizers().zero_grad()
                self.manual_backward(loss)
                self.optimizers().step()
            return loss

        def validation_step(self, batch, _):
            return (self.model(batch[0]) - batch[1]).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    module = Classifier()
    torch.manual_seed(1)
    data = torch.utils.data.TensorDataset(torch.randn(16, 3, 12, 12), torch.randn(16, 4))
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=2,
        accumulate_grad_batches=1 if manual else 2,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader, loader)
    return module


@needs_lightning
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("manual", [False, True], ids=["automatic", "manual"])
def test_a_lightning_trainer_is_lean(manual):
    callback = ours_for_lightning.lean_callback("norm")
    module = lightning_run([callback], manual)
    assert callback.saved.rebuilt_bytes > 0 or manual
    assert_same(module, lightning_run([], manual))
    assert "training_step" not in vars(module)


@needs_lightning
@pytest.mark.filterwarnings("ignore")
def test_a_lightning_fit_that_raises_leaves_no_wrapper():
    import_torchvision()
    import lightning

    modules = []

    class Fails(lightning.Callback):
        def on_train_batch_end(self, trainer, pl_module, *_):
            assert "training_step" in vars(pl_module)
            modules.append(pl_module)
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        lightning_run([ours_for_lightning.lean_callback(), Fails()])
    assert "training_step" not in vars(modules[0])


def test_without_lightning(monkeypatch):
    for name in ("lightning", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)
        for inner in [m for m in sys.modules if m.startswith(f"{name}.")]:
            monkeypatch.delitem(sys.modules, inner)
    with pytest.raises(MissingDependencyError, match="pip install lightning"):
        ours_for_lightning.lean_callback()
