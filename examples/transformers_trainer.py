"""A transformers `Trainer` trains a small Llama on the Python language reference.

    python examples/transformers_trainer.py

Needs transformers and accelerate. The text is `pydoc_data.topics`, which comes with Python; its bytes are the
tokens, so no tokenizer is loaded. The only difference is `callbacks=[lean_callback()]`.
"""

import with_torchvision as with_torchvision  # transformers imports torchvision

# isort: split
import tempfile
from pydoc_data.topics import topics

import torch
from measure import held, same_weights
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from leannorm.interop.transformers import lean_callback

LENGTH, BATCH, STEPS = 256, 2, 2


class Text(torch.utils.data.Dataset):
    """Pieces of `LENGTH` bytes."""

    def __init__(self):
        text = "\n".join(topics[name] for name in sorted(topics)).encode()
        self.pieces = torch.tensor(list(text[: LENGTH * 200])).view(-1, LENGTH)

    def __len__(self):
        return len(self.pieces)

    def __getitem__(self, i):
        return {"input_ids": self.pieces[i], "labels": self.pieces[i]}


def network():
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 3, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, use_cache=False, **sizes))


def train(callbacks):
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=BATCH,
            max_steps=STEPS,
            learning_rate=1e-3,
            use_cpu=True,
            bf16=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            seed=0,
        )
        trainer = Trainer(network(), arguments, train_dataset=Text(), callbacks=callbacks)
        print(f"loss over {STEPS} steps: {trainer.train().training_loss:.3f}")
    return trainer.model


def main():
    model = train([])
    same_weights(model, train([lean_callback()]))
    tokens = torch.stack([Text()[i]["input_ids"] for i in range(BATCH)])

    def loss():
        with torch.autocast("cpu", torch.bfloat16):
            return model(input_ids=tokens, labels=tokens).loss

    held(model, loss)


if __name__ == "__main__":
    main()
