"""A transformers Trainer, in plain PyTorch and at half of the activation memory: the same losses?"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from leannorm.interop.transformers import lean_callback
from leannorm.report.memory import measure_step

STEPS = 4


class Measured(Trainer):
    """Its last step says how many bytes the forward pass keeps for the backward pass."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        if self.state.global_step < STEPS - 1:
            return super().training_step(model, inputs, num_items_in_batch)
        losses = []

        def forward():
            losses.append(self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch))
            return losses[0]

        self.kept = measure_step(forward, self.accelerator.backward).held
        return losses[0].detach()


def fine_tune(callbacks):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=352, num_hidden_layers=3, num_attention_heads=4
    )
    tokens = torch.randint(256, (64, 128), generator=torch.Generator().manual_seed(1))
    trainer = Measured(
        LlamaForCausalLM(config),
        TrainingArguments(
            output_dir="out",
            max_steps=STEPS,
            per_device_train_batch_size=4,
            logging_steps=1,
            bf16=True,
            use_cpu=True,
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
        callbacks=callbacks,
    )
    trainer.train()
    return trainer.kept, [line["loss"] for line in trainer.state.log_history if "loss" in line]


if __name__ == "__main__":
    plain, losses = fine_tune([])
    callback = lean_callback(budget=0.5)
    ours, lean_losses = fine_tune([callback])
    print(callback.saved)
    print(f"kept: {ours} of {plain} bytes")
    print("losses:", losses, "the same" if losses == lean_losses else lean_losses)
