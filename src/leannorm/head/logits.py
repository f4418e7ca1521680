"""`Logits`: a tensor that is not computed until something asks for its values.

Functions listed in `READERS` compute what they need from it, and return tensors or other `Logits`. Any other
function gets the tensor: it is computed once, by the program's own calls in their order, and everything after
that is plain PyTorch. Code that bypasses torch's functions (a custom autograd function, an operator called in
C++) gets the values below autograd, and its gradient goes through `_Deferred`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.utils._pytree import tree_flatten, tree_map_only

from leannorm._errors import InputError
from leannorm.head.formula import Formula, Product, Setting, evaluate, flat, unflat, without_autocast
from leannorm.head.told import Told, computed_for

READERS: dict[Any, Callable[..., Any]] = {}
"""Maps a function of torch to the function that runs for it on logits, or returns NotImplemented."""

_SHOWN = (
    "shape dtype device ndim layout requires_grad is_leaf is_cuda is_cpu is_meta is_mps is_xpu is_sparse"
    " is_sparse_csr is_quantized is_nested is_mkldnn itemsize nbytes names is_complex is_floating_point size"
    " dim ndimension numel nelement element_size get_device is_contiguous stride is_signed __len__ __hash__"
    " _base storage_offset is_inference is_conj is_neg is_shared"
)
_METADATA = set[Any]()
for _name in _SHOWN.split():
    _shown = getattr(Tensor, _name, None)
    _METADATA |= {_shown, getattr(_shown, "__get__", None), getattr(torch, _name, None)} - {None}

_asis = torch._C.DisableTorchFunctionSubclass


class Logits(Tensor):
    """`kind` is what is taken of the formula: "logits", "log_softmax", "softmax", or a product of two."""

    formula: Formula
    products: list[Product]
    kind: str
    axis: int  # of the vocabulary
    parent: Logits | None
    told: Told
    _replay: Callable[[], Tensor] | None
    _made: Tensor | None
    _made_version: int
    _versions: list[Any]
    _family: list[weakref.ref[Logits]]
    hooks: list[Callable[[Tensor], Any]]  # of a sharded module: they run before the backward pass needs it

    @classmethod
    def of(
        cls,
        formula: Formula,
        products: Sequence[Product],
        like: Tensor,
        replay: Callable[[], Tensor],
        *,
        told: Told,
        parent: Logits | None = None,
        kind: str = "logits",
        axis: int = -1,
    ) -> Logits:
        """`like`, on the meta device, has the shape, strides and dtype; `replay()` computes the tensor."""
        products = list(products)
        made: Logits = _Deferred.apply(formula, products, (kind, axis), like, *flat(products))
        made.formula, made.products, made.kind, made.told, made.parent = formula, products, kind, told, parent
        made.axis = axis % like.dim()
        setting = Setting.now(products[0].rows.device.type)

        def run() -> Tensor:
            with setting.set():
                return replay()

        made._replay, made._made, made._made_version = run, None, 0
        made._versions = _versions_of(products)
        made._family, made.hooks = ([], []) if parent is None else (parent._family, parent.hooks)
        made._family.append(weakref.ref(made))
        with _asis():
            made.run_before_backward(made)
        return made

    @property
    def computed(self) -> bool:
        return self._made is not None

    def width(self) -> int:
        return len(self.products[0].weight)

    def check(self) -> None:
        """Raise if a tensor that the logits are computed from was edited or freed since."""
        for p in self.products:
            if p.weight.numel() and not p.weight.untyped_storage().nbytes():
                raise InputError(
                    "lean(head=True): these logits are computed when they are first read, and the memory of"
                    f" their layer's weight {tuple(p.weight.shape)} was freed by then (by sharding?); read"
                    " them within the forward pass, or leave head=True out"
                )
        if _versions_of(self.products) != self._versions:
            raise InputError(
                "lean(head=True): these logits are computed when they are first read, from a layer's input"
                f" and weight, of which one {tuple(self.products[0].weight.shape)} or its input was edited in"
                " place since (by an optimizer's step?); read them before that, or leave head=True out"
            )
        above = self.parent
        while above is not None:
            if above._made is not None and above._made._version != above._made_version:
                raise InputError(
                    "lean(head=True): these logits were made of others that were edited in place since, where"
                    " torch does not tell; use them before the edit, or leave head=True out"
                )
            above = above.parent

    def made(self, reader: str | None) -> Tensor:
        """Compute the tensor for `reader`, or (None) for logits that are derived from it."""
        if self._made is None:
            assert self._replay is not None
            self.check()
            if reader is not None:
                self.told.note(self.width(), computed_for(reader, self.width()))
            with torch._C.DisableTorchFunction():  # modes are off too, `Heads` among them
                self._made = self._replay()
                self.run_before_backward(self._made)
            self._made_version, self._replay = self._made._version, None
        return self._made

    def join(self, summed: Logits) -> None:
        """Be a part of a sum, which belongs to the family of another layer."""
        if self._family is not summed._family:
            self._family.append(weakref.ref(summed))
            summed.hooks.extend(self.hooks)
            with _asis():
                self.run_before_backward(summed)

    def make_family(self, reader: str) -> None:
        """Compute all logits that this layer's output was made into, before they can no longer be."""
        families, seen = [self._family], set[int]()
        while families:
            family = families.pop()
            if id(family) in seen:
                continue
            seen.add(id(family))
            for logits in [reference() for reference in family]:
                if logits is not None:
                    if not logits.computed:
                        logits.made(reader)
                    families.append(logits._family)

    def run_before_backward(self, made: Tensor) -> None:
        """Let `hooks` run before the gradient of what was made of the logits."""
        for hook in self.hooks if made.requires_grad else ():
            made.register_hook(hook)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA:
            with _asis():
                return func(*args, **kwargs)
        reader = READERS.get(func)
        if reader is not None:
            found = reader(func, *args, **kwargs)
            if found is not NotImplemented:
                return _hooked(found, _among(args, kwargs))
        name = name_of(func)
        if _writes(func, name, kwargs):
            for logits in _among(args, kwargs):
                logits.make_family(name)
        return func(*_plain(args, name), **_plain(kwargs, name))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.detach.default and not args[0].computed:
            return args[0]._alias()
        for logits in _among(args, kwargs):
            if func._schema.is_mutable:
                logits.make_family(str(func))
            elif logits._made is not None and logits._made._version != logits._made_version:
                raise InputError(
                    f"lean(head=True): logits that were edited in place reached {func} past torch's"
                    " functions, and their gradient would be that without the edit; give it a copy, or leave"
                    " head=True out"
                )
        name = f"{func}, past torch's functions"
        return func(*_values(args, name), **_values(kwargs, name))

    def _alias(self) -> Logits:
        """The same logits without a graph, as autograd detaches what it saves."""
        with _asis(), torch.no_grad():
            made = _wrapper(self)
        made.__dict__.update(self.__dict__)
        made.parent, made._replay = self, lambda: self.made(None).detach()
        return made


def _wrapper(like: Tensor) -> Logits:
    made: Logits = Tensor._make_wrapper_subclass(
        Logits, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device
    )
    return made


class _Deferred(Function):
    """The node of logits in autograd's graph: it passes a gradient on through the formula."""

    @staticmethod
    def forward(ctx: Any, formula: Any, products: Any, kind_axis: Any, like: Any, *tensors: Any) -> Logits:
        kind, axis = kind_axis
        ctx.formula, ctx.kind, ctx.dtypes = formula, kind, tuple(p.dtype for p in products)
        ctx.axis = axis
        ctx.save_for_backward(*tensors)
        with _asis():
            return Tensor._make_wrapper_subclass(
                Logits, like.shape, strides=like.stride(), dtype=like.dtype, device=products[0].rows.device
            )

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        again, needed = torch.is_grad_enabled(), ctx.needs_input_grad[4:]
        tensors = [
            t if again or t is None else t.detach().requires_grad_(need)
            for t, need in zip(ctx.saved_tensors, needed, strict=True)
        ]
        with torch.enable_grad(), without_autocast(grad.device.type):
            products = [p.casted() for p in unflat(tensors, ctx.dtypes)]
            y = KINDS[ctx.kind](evaluate(ctx.formula, [p.columns(0, len(p.weight)) for p in products]))
            y = y.movedim(-1, ctx.axis)
            inputs = [t for t, need in zip(tensors, needed, strict=True) if need]
            found = torch.autograd.grad(y, inputs, grad.to(y.dtype), create_graph=again)
        rest = iter(found)
        return None, None, None, None, *(next(rest) if need else None for need in needed)


KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "logits": lambda y: y,
    "log_softmax": lambda y: torch.log_softmax(y, -1),
    "softmax": lambda y: torch.softmax(y, -1),
    "softmax·log_softmax": lambda y: torch.softmax(y, -1) * torch.log_softmax(y, -1),
    "softmax·logits": lambda y: torch.softmax(y, -1) * y,
}


def name_of(func: Any) -> str:
    """The name by which a program calls the function."""
    name = getattr(func, "__name__", "?")
    return str(func.__self__.__name__ if name in ("__get__", "__set__", "__delete__") else name)


def _writes(func: Any, name: str, kwargs: Any) -> bool:
    """Whether the function may edit its arguments."""
    dunder = name.startswith("__")
    if (name.endswith("_") and not dunder) or name == "__setitem__":
        return True
    if dunder and name[2:3] == "i" and name[2:] not in ("int__", "index__", "invert__", "iter__"):
        return True
    return getattr(func, "__name__", "") in ("__set__", "__delete__") or any(
        kwargs.get(key) is not None and kwargs[key] is not False for key in ("out", "inplace")
    )


def _among(args: Any, kwargs: Any) -> list[Logits]:
    return [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Logits)]


def _plain(args: Any, name: str) -> Any:
    return tree_map_only(Logits, lambda x: x.made(name), args)


def _values(args: Any, name: str) -> Any:
    return tree_map_only(Logits, lambda x: x.made(name).detach(), args)


def _hooked(found: Any, read: list[Logits]) -> Any:
    """What a reader found; logits among it have the hooks already."""
    hooked = [logits for logits in read if logits.hooks]
    for made in tree_flatten(found)[0] if hooked else ():
        if isinstance(made, Tensor) and not isinstance(made, Logits):
            for logits in hooked:
                logits.run_before_backward(made)
    return found


def _versions_of(products: Sequence[Product]) -> list[Any]:
    versions = [t._version for t in flat(products) if t is not None]
    return versions + [p.edits() for p in products if p.edits is not None]
