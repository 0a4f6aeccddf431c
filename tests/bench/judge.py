"""How the benchmark judges the contenders of a layer."""

from moe_aiter.bench import command, layer


def check(field, problem):
    """What the row of each says of its error."""
    rows = command.check_all(field, layer.by_loop(problem), lambda contender: {})
    return [{name: cell for name, cell in row.items() if name != "contender"} for row in rows]
