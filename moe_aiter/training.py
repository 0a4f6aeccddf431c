"""The former place of examples/language_model/: deprecated, until 0.4."""

import warnings

from .cli import import_example
from .config import SettingError

warnings.warn(
    "moe_aiter.training is deprecated: use examples/language_model/ of the repository",
    DeprecationWarning,
    stacklevel=2,
)
try:
    import_example(__name__)  # which takes the place of this module
except SettingError as error:  # an installed package
    raise ImportError(error) from error
