"""Of all combinations of a test's parameters, a few in which every pair of values occurs."""

import itertools


def fewest(combinations: list[dict]) -> list[int]:
    """The numbers of combinations that hold all pairs of values there are: the one with most new pairs, again
    and again."""
    numbers = {}  # of the values, which need not be hashable, by name and identity
    valued = [[numbers.setdefault((k, id(v)), len(numbers)) for k, v in c.items()] for c in combinations]
    pairs = [set(itertools.combinations(sorted(c), 2)) for c in valued]
    missing, chosen = set().union(*pairs), []
    while missing:
        best = max(range(len(pairs)), key=lambda i: len(pairs[i] & missing))
        missing -= pairs[best]
        chosen.append(best)
    return sorted(chosen)
