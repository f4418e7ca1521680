"""The errors leannorm raises: each states the rule, the value received and the remedy."""


class LeannormError(Exception):
    """Base of every error that leannorm raises on purpose.

    >>> import leannorm
    >>> issubclass(leannorm.InputError, leannorm.LeannormError)
    True
    """


class InputError(LeannormError, ValueError, RuntimeError):
    """An argument breaks a rule; also a ValueError and a RuntimeError, since torch raises either.

    >>> import torch, leannorm
    >>> try:
    ...     leannorm.nn.BatchNorm1d(4)(torch.randn(1, 4))
    ... except ValueError as error:
    ...     print(type(error).__name__, str(error)[:50])
    InputError Expected more than 1 value per channel when traini
    """


class DtypeError(InputError, TypeError):
    """A tensor has a dtype that the operation is not defined for.

    >>> import torch, leannorm
    >>> try:
    ...     leannorm.functional.layer_norm(torch.ones(2, 2, dtype=torch.int64), (2,))
    ... except leannorm.DtypeError as error:
    ...     print(str(error)[:28])
    input must be floating point
    """


class BackendUnavailableError(LeannormError, RuntimeError):
    """A backend chosen by name cannot compute this call; `reasons` lists why.

    >>> import torch, leannorm
    >>> try:
    ...     with leannorm.use_backend("cpu"):
    ...         leannorm.functional.layer_norm(torch.ones(2, 2, device="meta"), (2,))
    ... except leannorm.BackendUnavailableError as error:
    ...     print(error.name, len(error.reasons))
    cpu 1
    """

    def __init__(self, name: str, reasons: list[str]) -> None:
        super().__init__(f"backend {name!r} cannot serve this call: {'; '.join(reasons)}")
        self.name = name
        self.reasons = reasons


class MissingDependencyError(LeannormError, ImportError):
    """An optional package is needed for this; the message names the extra to install.

    >>> import leannorm
    >>> issubclass(leannorm.MissingDependencyError, ImportError)
    True
    """


class SyncError(LeannormError, RuntimeError):
    """Ranks that share statistics did not come together: one is missing, or they disagree.

    >>> import leannorm
    >>> issubclass(leannorm.SyncError, RuntimeError)
    True
    """


class FoldError(LeannormError, RuntimeError):
    """A folded model does not compute what the model does; nothing was returned or changed.

    >>> import leannorm
    >>> issubclass(leannorm.FoldError, RuntimeError)
    True
    """
