"""What is wrong with a checkpoint, all of it at once; and a package that is missing."""

from types import ModuleType

from ... import files

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
    return files.need(module, "convert")
