"""What `lean()` keeps of a training step in the trainers of docs/recipes/trainers.md.

    python -m benchmarks.trainers [TRAINER ...] [--json FILE]

Takes a few steps with each trainer whose package is installed. Activations and peak memory are relative to
plain PyTorch, and all losses and weights are compared bit for bit.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.architectures import import_torchvision
from benchmarks.held import Row, parsed, parser_of, tell
from leannorm.report.memory import measure_step
from leannorm.saving import lean, make_lean

PAGE = Path(__file__).parent.parent / "docs" / "recipes" / "trainers.md"
Setting = Literal["norm", "conv"]
Trained = tuple[nn.Module, list[float], Callable[[], Tensor]]  # losses of the steps, and a forward pass


def _of_page(package: str) -> dict[str, Any]:
    """What the file for this package on the page defines."""
    (code,) = (
        found for found in re.findall(r"(?s)\$ cat \S+\n(.*?)```", PAGE.read_text()) if package in found
    )
    names: dict[str, Any] = {}
    exec(code, names)
    return names


def _nnunet(setting: Setting | None) -> Trained:
    """Train by nnU-Net's trainer, or by the page's class, on hand-written plans and noise."""
    folder = Path(mkdtemp())
    (folder / "Made" / "made").mkdir(parents=True)
    (folder / "Made" / "made" / "case.b2nd").touch()  # the suffix decides how nnU-Net reads data
    os.environ |= dict.fromkeys(("nnUNet_raw", "nnUNet_preprocessed", "nnUNet_results"), str(folder))
    from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer

    cls = nnUNetTrainer
    if setting is not None:
        cls = _of_page("nnunetv2")["nnUNetTrainerLean"]
        cls.recompute = setting
    how: Row = {"n_stages": 4, "features_per_stage": [8, 16, 32, 64], "kernel_sizes": [[3] * 3] * 4}
    how |= {"strides": [[1] * 3, *[[2] * 3] * 3], "n_conv_per_stage": [2] * 4, "conv_bias": True}
    how |= {"n_conv_per_stage_decoder": [2] * 3, "norm_op_kwargs": {"eps": 1e-5, "affine": True}}
    how |= {
        "conv_op": "torch.nn.Conv3d",
        "norm_op": "torch.nn.InstanceNorm3d",
        "nonlin": "torch.nn.LeakyReLU",
    }
    how |= {"nonlin_kwargs": {"inplace": True}}
    of: Row = {
        "network_class_name": "dynamic_network_architectures.architectures.unet.PlainConvUNet",
        "arch_kwargs": how,
    }
    of |= {"_kw_requires_import": ["conv_op", "norm_op", "nonlin"]}
    plan: Row = {"data_identifier": "made", "batch_size": 2, "patch_size": [32] * 3, "spacing": [1.0] * 3}
    plan |= {"batch_dice": False, "architecture": of}
    plans: Row = {"dataset_name": "Made", "plans_name": "made", "configurations": {"3d_fullres": plan}}
    plans |= {"label_manager": "LabelManager", "continue_training": False}
    labels = {"background": 0, "ball": 1, "box": 2}
    torch.manual_seed(0)
    trainer = cls(plans, "3d_fullres", 0, {"channel_names": {"0": "made"}, "labels": labels},
                  torch.device("cpu"))  # fmt: skip
    trainer.initialize()
    trainer.network.train()
    draw = torch.Generator().manual_seed(0)

    def batch() -> dict[str, Any]:
        sides = [int(32 * scale[0]) for scale in trainer._get_deep_supervision_scales()]
        target = [torch.randint(3, (2, 1, n, n, n), generator=draw).float() for n in sides]
        return {"data": torch.randn(2, 1, 32, 32, 32, generator=draw), "target": target}

    losses = [float(trainer.train_step(batch())["loss"]) for _ in range(3)]
    last = batch()
    return trainer.network, losses, lambda: trainer.loss(trainer.network(last["data"]), last["target"])


def _monai(setting: Setting | None) -> Trained:
    """Train MONAI's UNet with dropout by its trainer, for two epochs of noise."""
    from monai.engines import SupervisedTrainer
    from monai.losses import DiceCELoss

    from benchmarks.volumes import volumes

    network, _ = volumes("UNet")
    if setting is not None:
        make_lean(network, setting)
    draw = torch.Generator().manual_seed(0)
    images, labels = torch.randn(4, 1, 32, 32, 32, generator=draw), torch.ones(1, 32, 32, 32)
    samples: Any = [{"image": x, "label": labels} for x in images]
    loader = torch.utils.data.DataLoader(samples, batch_size=2)
    trainer = SupervisedTrainer(
        device=torch.device("cpu"), max_epochs=2, train_data_loader=loader, network=network,
        optimizer=torch.optim.SGD(network.parameters(), 0.1),
        loss_function=(loss := DiceCELoss(to_onehot_y=True, softmax=True)),
    )  # fmt: skip
    trainer.run()
    return (
        network,
        [trainer.state.output[0]["loss"]],
        lambda: loss(network(images[:2]), labels.expand(2, 1, -1, -1, -1)),
    )


def _trained(model: nn.Module, loss: Callable[[], Tensor]) -> list[float]:
    """The losses of three steps."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), 1e-3, foreach=False), []
    for _ in range(3):
        optimizer.zero_grad()
        (value := loss()).backward()
        optimizer.step()
        losses.append(value.item())
    return losses


def _torchtitan(setting: Setting | None) -> Trained:
    """Train torchtitan's small Llama, sharded over one process by its own function.

    Its attention is torch's, as FlexAttention has no backward pass on a CPU.
    """
    import torch.distributed as dist
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import ParallelDims, parallel_dims
    from torchtitan.models.common.attention import FlexAttention
    from torchtitan.models.llama3 import model_registry

    def attend(self: Any, *qkv: Tensor, **others: Any) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in qkv)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return y.transpose(1, 2)

    FlexAttention.forward = attend
    parallel_dims.device_type = "cpu"
    if not dist.is_initialized():
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    dims = ParallelDims(dp_replicate=1, dp_shard=1, cp=1, tp=1, pp=1, ep=1, world_size=1)
    dims.build_mesh()
    spec = model_registry("debugmodel")
    if setting is not None:
        names = _of_page("torchtitan")
        names["RECOMPUTE"] = setting
        spec = names["lean_registry"]("debugmodel")
    torch.manual_seed(0)
    with torch.device("meta"):
        made = spec.model.build()
    model = spec.parallelize_fn(
        made, parallel_dims=dims, training=TrainingConfig(mixed_precision_param="float32"),
        parallelism=ParallelismConfig(), compile_config=CompileConfig(enable=False), ac_config=None,
        dump_folder="",
    )  # fmt: skip
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    model.train()
    tokens = torch.randint(2048, (2, 257), generator=torch.Generator().manual_seed(0))
    places = torch.arange(256).expand(2, 256).contiguous()
    masks = model.get_attention_masks(places)

    def loss() -> Tensor:
        logits = model(tokens[:, :-1], positions=places, attention_masks=masks)
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

    return model, _trained(model, loss), loss


def _accelerate(setting: Setting | None) -> Trained:
    """Train torchvision's ResNet-18, prepared by an Accelerator."""
    from accelerate import Accelerator
    from torchvision.models import resnet18

    torch.manual_seed(0)
    model = resnet18(num_classes=10)
    if setting is not None:
        make_lean(model, setting)
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    x, losses = torch.randn(8, 3, 64, 64, generator=torch.Generator().manual_seed(0)), []
    loss = lambda: F.cross_entropy(model(x), torch.arange(8))  # noqa: E731
    for _ in range(3):
        optimizer.zero_grad()
        accelerator.backward(value := loss())
        optimizer.step()
        losses.append(value.item())
    return accelerator.unwrap_model(model), losses, loss


def _trl(setting: Setting | None) -> Trained:
    """Train a small Llama on random tokens by TRL's trainer."""
    from datasets import Dataset
    from datasets.table import InMemoryTable
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    from leannorm.interop.transformers import lean_callback

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(100)}, unk_token="w0"))
    named = {"unk_token": "w0", "eos_token": "w1", "pad_token": "w2"}
    tokens = torch.randint(3, 100, (8, 256), generator=torch.Generator().manual_seed(0))
    table = InMemoryTable.from_pydict({"input_ids": tokens.tolist(), "labels": tokens.tolist()})
    sizes = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 3, "vocab_size": 100}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, use_cache=False))
    settings: dict[str, Any] = {"per_device_train_batch_size": 4, "num_train_epochs": 1, "use_cpu": True}
    settings |= {"bf16": False, "report_to": [], "save_strategy": "no", "gradient_checkpointing": False}
    settings |= {"disable_tqdm": True, "dataset_kwargs": {"skip_prepare_dataset": True}}
    callbacks = [] if setting is None else [lean_callback(setting)]
    trainer = SFTTrainer(
        model, args=SFTConfig(output_dir=mkdtemp(), **settings), callbacks=callbacks,
        train_dataset=Dataset(table, fingerprint="made"),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=words, **named),
    )  # fmt: skip
    losses = [trainer.train().training_loss]
    assert all(callback.saved.rebuilt_bytes for callback in callbacks)

    def loss() -> Tensor:
        with nullcontext() if setting is None else lean(setting):
            found: Tensor = model(input_ids=tokens[:4], labels=tokens[:4]).loss
        return found

    return model, losses, loss


TRAINERS = {  # and the package that each needs
    "nnU-Net": ("nnunetv2", _nnunet),
    "MONAI": ("ignite", _monai),
    "accelerate": ("accelerate", _accelerate),
    "TRL": ("trl", _trl),
    "torchtitan": ("torchtitan", _torchtitan),
}


def of_trainer(name: str) -> Iterator[Row]:
    """Yield the rows of one trainer."""
    import_torchvision()
    stock: list[Any] = []
    settings: dict[str, Setting | None] = {
        "stock": None,
        'lean("norm")': "norm",
        'lean("conv")': "conv",
    }
    for called, setting in settings.items():
        model, losses, loss = TRAINERS[name][1](setting)
        model.zero_grad()
        kept, peak, *_ = measure_step(loss)
        state = [
            getattr(value, "full_tensor", lambda value=value: value)()
            for value in model.state_dict().values()
        ]
        stock = stock or [state, losses, kept, peak]
        equal = losses == stock[1] and all(map(torch.equal, state, stock[0]))
        shares = {"held": round(kept / stock[2], 4), "peak": round(peak / stock[3], 4)}
        yield {"trainer": name, "setting": called, **shares, "equal": equal}
    if name == "torchtitan":
        torch.distributed.destroy_process_group()


def main() -> None:
    options = parsed(parser_of(__doc__, TRAINERS, "TRAINER"))
    names = [name for name in options.names or TRAINERS if find_spec(TRAINERS[name][0]) is not None]
    tell(options, (row for name in names for row in of_trainer(name)), "trainer", "setting")


if __name__ == "__main__":
    main()
