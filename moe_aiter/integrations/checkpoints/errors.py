"""What is wrong with a checkpoint, all of it at once; and a package that is missing."""

import importlib
from types import ModuleType

SHOWN = 50


class CheckpointError(ValueError):
    """A checkpoint that is refused: `problems` lists every reason, the message the first 50."""

    def __init__(self, what: str, problems: list[str]):
        self.problems = problems
        lines = [f"{what}: {len(problems)} problem{'s' if len(problems) > 1 else ''}", *problems[:SHOWN]]
        if len(problems) > SHOWN:
            lines.append(f"and {len(problems) - SHOWN} more")
        super().__init__("\n  ".join(lines))


def need(module: str) -> ModuleType:
    """Import a module that only conversions need, or say how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ImportError(f"{package} is missing: pip install '.[convert]' in the source tree") from error
