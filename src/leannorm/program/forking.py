"""`fork`: a model is exported in training and in evaluation mode, and both graphs are joined."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from leannorm import _checks
from leannorm._batch import inputs_of
from leannorm._errors import InputError
from leannorm._untouched import themselves, untouched
from leannorm.functional.exporter import export
from leannorm.program.join import INFER, TRAIN, join
from leannorm.program.program import Program
from leannorm.program.signature import signature_of


def fork(
    model: torch.nn.Module,
    example_inputs: Tensor | tuple[Any, ...] | Mapping[str, Any],
    dynamic_shapes: Any = None,
    example_kwargs: Mapping[str, Any] | None = None,
) -> Program:
    """Make one program of a model: a training and an inference branch after a shared part, with one state.

    The model is exported in training mode and in evaluation mode; nodes are shared up to the first
    operator that behaves differently (batch norm, dropout), and what follows is duplicated, as in the
    operator's design (Paddle, batch_norm_op.md, 2017). `program.train(*x)` equals `model.train()(*x)` bit for
    bit, statistics, counters, gradients and dropout included, and `program.infer(*x)` equals
    `model.eval()(*x)`. The variables are the model's own tensors.

    `example_inputs` are a tensor, a tuple, or a mapping by name; `example_kwargs` and `dynamic_shapes` are
    those of `torch.export.export`: a size that is not named in `dynamic_shapes` is fixed to the example's and
    checked at every call. The model is left as it was.

    Raises: `InputError` if the model cannot be exported, with the reason.

    >>> import torch
    >>> from leannorm import program
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.ReLU())
    >>> batch = torch.export.Dim("batch", min=2)
    >>> forked = program.fork(net, (torch.randn(8, 4),), dynamic_shapes=({0: batch},))
    >>> forked.infer(torch.randn(3, 4)).shape
    torch.Size([3, 4])
    """
    _checks.module(model, "fork")
    inputs = inputs_of(example_inputs, "example_inputs")
    named = {**inputs.kwargs, **(example_kwargs or {})}
    exports = {}
    with untouched(model, themselves), _counters_stay_on_the_device(model):
        for branch in (TRAIN, INFER):
            model.train(branch == TRAIN)
            exports[branch] = export(model, inputs.args, named, dynamic_shapes)
    variables: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    variables.update(model.named_buffers(remove_duplicate=False))
    train, infer = exports[TRAIN], exports[INFER]
    try:
        joined = join(train, infer, variables)
        signature = signature_of(train, infer)
    except (NotImplementedError, ValueError) as error:
        raise InputError(f"the model's exports cannot be joined: {error}") from error
    structures = {branch: program.call_spec.out_spec for branch, program in exports.items()}
    return Program(joined, signature, structures)


@contextmanager
def _counters_stay_on_the_device(model: torch.nn.Module) -> Iterator[None]:
    """Within it, torch's batch norms with momentum=None are traced as one operator of leannorm.

    Their own forward reads the counter's value, which torch.export cannot trace.
    """
    layers = [
        module
        for module in model.modules()
        if isinstance(module, _BatchNorm) and type(module).forward is _BatchNorm.forward
        if module.momentum is None and module.track_running_stats and "forward" not in vars(module)
    ]
    for layer in layers:
        vars(layer)["forward"] = partial(_cumulative, layer)
    try:
        yield
    finally:
        for layer in layers:
            del vars(layer)["forward"]


def _cumulative(layer: _BatchNorm, x: Tensor) -> Tensor:
    if not layer.training:
        return _BatchNorm.forward(layer, x)
    layer._check_input_dim(x)
    state = (layer.running_mean, layer.running_var, layer.num_batches_tracked)
    y: Tensor = torch.ops.leannorm.cumulative_batch_norm(x, *state, layer.weight, layer.bias, layer.eps)
    return y
