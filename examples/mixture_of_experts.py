"""A mixture of experts learns the Python language reference, byte by byte, under `lean("conv")`.

    python examples/mixture_of_experts.py

Needs transformers. The model is a Qwen3-MoE of 2 layers, with 4 of 16 experts per token.
"""

import with_torchvision as with_torchvision  # transformers imports torchvision

# isort: split
from contextlib import nullcontext
from pydoc_data.topics import topics

import torch
from measure import held, same_weights
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import leannorm

LENGTH, BATCH, STEPS = 256, 4, 5


def batches():
    text = "\n".join(topics[name] for name in sorted(topics)).encode()
    return torch.tensor(list(text[: LENGTH * BATCH * STEPS])).view(STEPS, BATCH, LENGTH)


def network():
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    experts = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 96, "head_dim": 32}
    balance = {"output_router_logits": True, "router_aux_loss_coef": 0.01}  # a loss that reads the router
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=256, use_cache=False, **sizes, **experts, **balance))


def train(around):
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses = []
    for tokens in batches():
        with around:
            loss = model(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(f"loss: {losses[0]:.3f} at first, {losses[-1]:.3f} after {STEPS} steps")
    return model


def main():
    torch.set_num_threads(1)  # more would add up the gradient of a gathered weight in no fixed order
    stock, model = train(nullcontext()), train(leannorm.lean("conv"))
    same_weights(stock, model)
    tokens = batches()[0]
    for recompute in ("norm", "conv"):
        print(f"lean({recompute!r})", end=" ")
        held(model, lambda: model(input_ids=tokens, labels=tokens).loss, recompute=recompute)


if __name__ == "__main__":
    main()
