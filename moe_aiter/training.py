"""The former place of examples/language_model/: deprecated, until 0.4."""

import warnings

from .cli import imported

warnings.warn(
    "moe_aiter.training is deprecated: use examples/language_model/ of the repository",
    DeprecationWarning,
    stacklevel=2,
)
example = imported("language_model")
UsageError, need, __path__ = example.UsageError, example.need, example.__path__
