"""Every error that kitchen raises on purpose. Each message says what was given, what is allowed, and what to do."""


class KitchenError(Exception):
    """Base of all errors of kitchen."""


class UnsupportedError(KitchenError, ValueError):
    """A shape, dtype, value or device that an operator cannot take, or a kernel that cannot run when it was forced."""


class FormatError(KitchenError, ValueError):
    """A checkpoint or a set of tensors that does not fit its format."""


class PluginError(KitchenError, RuntimeError):
    """A plug-in that is missing, or that could not be loaded."""


class BuildMismatchError(PluginError):
    """A plug-in or a binary that speaks another ABI number than kitchen-core."""


class InferenceOnlyError(KitchenError, RuntimeError):
    """A gradient was asked of something that has none."""


class NonFiniteError(KitchenError, ArithmeticError):
    """An op gave an inf or a NaN while ``check_finite`` was on."""
