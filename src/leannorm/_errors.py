"""The errors leannorm raises: each says the rule, the value received and the remedy."""


class LeannormError(Exception):
    """Base of every error that leannorm raises on purpose."""


class InputError(LeannormError, ValueError, RuntimeError):
    """An argument breaks a rule; also a ValueError and a RuntimeError, as torch raises either."""


class DtypeError(InputError, TypeError):
    """A tensor has a dtype that the operation is not defined for."""


class BackendUnavailableError(LeannormError, RuntimeError):
    """A backend asked for by name cannot serve this call; `reasons` lists why."""

    def __init__(self, name: str, reasons: list[str]) -> None:
        super().__init__(f"backend {name!r} cannot serve this call: {'; '.join(reasons)}")
        self.name = name
        self.reasons = reasons


class MissingDependencyError(LeannormError, ImportError):
    """An optional package is needed for what was asked; the message names the extra to install."""


class SyncError(LeannormError, RuntimeError):
    """Ranks that share statistics did not come together: one is missing, or they disagree."""


class FoldError(LeannormError, RuntimeError):
    """A folded model does not compute what the model did; nothing was returned or changed."""
