"""`lean(verify=True)`: every rebuilt tensor is compared with the one that plain PyTorch would have kept."""

from __future__ import annotations

import threading

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from leannorm._torch import left_to_python
from leannorm.saving.evidence import RebuildError, layout, same_bits


def check_equal(rebuilt: Tensor, original: Tensor, name: str, where: str) -> None:
    """Raises RebuildError at the first difference in layout or bits."""
    what = f"the output of {name} of shape {list(original.shape)}"
    if where:
        what += f", saved in {where},"
    if layout(rebuilt) != layout(original):
        raise RebuildError(f"{what} was rebuilt in another layout: {layout(rebuilt)}, not {layout(original)}")
    if same_bits(rebuilt, original):
        return
    ours, stock = (t.reshape(-1) for t in (rebuilt, original))
    i = int(torch.nonzero((ours != stock) & ~(ours.isnan() & stock.isnan())).flatten()[:1].sum())
    place = [int(v) for v in torch.unravel_index(torch.tensor(i), original.shape)]
    raise RebuildError(
        f"{what} was rebuilt wrongly: at {place} it is {ours[i].item()!r} where the forward pass had"
        f" {stock[i].item()!r}. Either it was edited where autograd does not see it (under no_grad, through"
        " .data) before it was saved, or this is a defect of leannorm: please report it with this message"
    )


class Layers:
    """Tracks the innermost module that runs in this thread, by global module hooks."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._at_work: list[nn.Module] = []
        self._handles: list[RemovableHandle] = []

    def open(self) -> None:
        modules = torch.nn.modules.module
        self._handles = [
            modules.register_module_forward_pre_hook(self._enter),
            modules.register_module_forward_hook(self._leave, always_call=True),
        ]

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self._at_work = [], []

    def at_work(self) -> str:
        """The repr of the innermost running module."""
        return " ".join(repr(self._at_work[-1]).split()) if self._at_work else ""

    @left_to_python
    def _enter(self, module: nn.Module, inputs: object) -> None:
        if threading.get_ident() == self._thread:
            self._at_work.append(module)

    @left_to_python
    def _leave(self, module: nn.Module, inputs: object, output: object) -> None:
        if threading.get_ident() == self._thread and self._at_work:
            self._at_work.pop()
