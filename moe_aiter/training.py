"""The former place of examples/language_model/: deprecated, until 0.4."""

import warnings

from .cli import imported
from .config import SettingError

warnings.warn(
    "moe_aiter.training is deprecated: use examples/language_model/ of the repository",
    DeprecationWarning,
    stacklevel=2,
)
try:
    example = imported("language_model")
except SettingError as error:  # an installed package
    raise ImportError(error) from error
UsageError, need, __path__ = example.UsageError, example.need, example.__path__
