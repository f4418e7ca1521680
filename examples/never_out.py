"""Training that runs out of memory in plain PyTorch, and does not under `lean(limit="device")`.

    python examples/never_out.py

A small language model reads passages of Python's documentation. Each batch is padded to its longest passage,
and a few batches are much longer than the rest. Two processes train the same model. Each may take a fixed
amount of memory more than at its start, as `ulimit -d` would limit it. Needs Linux, and no data.
"""

import pydoc_data.topics
import re
import resource
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import nn

import leannorm

MEMORY = 360 * 2**20  # bytes beyond what the process has at the start
STEPS, BATCH, WIDTH, LAYERS = 12, 4, 192, 6
LONGEST = 1000  # bytes of text


class Model(nn.Module):
    """Predicts the next byte."""

    def __init__(self):
        super().__init__()
        self.bytes = nn.Embedding(256, WIDTH)
        self.places = nn.Embedding(LONGEST, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, 4, 4 * WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, text):
        x = self.bytes(text) + self.places(torch.arange(text.shape[1]))
        mask = nn.Transformer.generate_square_subsequent_mask(text.shape[1])
        return self.head(self.blocks(x, mask=mask, is_causal=True))


def batches():
    """Passages in a random order that is the same in both processes."""
    passages = [text.encode()[:LONGEST] for text in pydoc_data.topics.topics.values()]
    order = torch.randperm(len(passages), generator=torch.Generator().manual_seed(0)).tolist()
    assert len(passages) >= STEPS * BATCH
    for step in range(STEPS):
        taken = [torch.tensor(list(passages[i])) for i in order[step * BATCH :][:BATCH]]
        short = [text[: 200 + 20 * step] for text in taken]
        is_long = step % 6 == 5
        yield nn.utils.rnn.pad_sequence(taken if is_long else short, batch_first=True)


def train(context):
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step, text in enumerate(batches()):
        try:
            with context() as saved:
                logits = model(text[:, :-1])
                loss = nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
            loss.backward()
        except RuntimeError as error:
            if "can't allocate memory" not in str(error):
                raise
            print(f"out of memory in step {step}, a batch of {tuple(text.shape)}")
            return
        optimizer.step()
        optimizer.zero_grad()
        again = "" if saved is None else f", {saved.rebuilt_bytes / 2**20:.0f} MiB computed again"
        print(f"step {step}, a batch of {tuple(text.shape)}: loss {loss.item():.6f}{again}", flush=True)
    print(f"all {STEPS} steps", flush=True)


def in_a_process(which):
    """Run the training in a new process, and return the lines that it prints."""
    ran = subprocess.run([sys.executable, __file__, which], capture_output=True, text=True, check=True)
    return ran.stdout.splitlines()


def main():
    plain, ours = in_a_process("plain"), in_a_process("lean")
    print(f"{STEPS} steps, in {MEMORY / 2**20:.0f} MiB more than at the start")
    print("plain PyTorch:", plain[-1])
    print('lean(limit="device"):', ours[-1])
    again = [not line.endswith(", 0 MiB computed again") for line in ours[:-1]]
    print(f"steps that compute something again: {sum(again)} of {len(again)}")
    losses = [[line.split("loss ")[1].split(",")[0] for line in lines[:-1]] for lines in (plain, ours)]
    same = all(a == b for a, b in zip(*losses, strict=False))
    print(f"the losses of the first {len(losses[0])} steps are", "the same" if same else "not the same")


if __name__ == "__main__":
    if len(sys.argv) == 1:
        main()
    else:
        (kilobytes,) = re.findall(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())
        most = int(kilobytes) * 1024 + MEMORY
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
        train(nullcontext if sys.argv[1] == "plain" else lambda: leannorm.lean(limit="device"))
