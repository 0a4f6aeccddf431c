"""Of all combinations of a test's parameters, a few in which every pair of values occurs."""

import heapq
import itertools


def fewest(combinations: list[dict]) -> list[int]:
    """Return the numbers of combinations that hold all pairs of values there are."""
    numbers = {}  # of the values, which need not be hashable, by name and identity
    valued = [[numbers.setdefault((k, id(v)), len(numbers)) for k, v in c.items()] for c in combinations]
    pairs = [set(itertools.combinations(sorted(c), 2)) for c in valued]
    return covering(pairs, [1] * len(pairs))


def covering(sets: list[set], costs: list[int]) -> list[int]:
    """Return the numbers of sets that hold all elements: first those with most new ones for their cost."""
    missing, chosen = set().union(*sets), []
    # gains only shrink, so the first whose gain is up to date is the best
    best_first = [(-len(s) / cost, i) for i, (s, cost) in enumerate(zip(sets, costs, strict=True))]
    heapq.heapify(best_first)
    while missing:
        gain, i = best_first[0]
        now = -len(sets[i] & missing) / costs[i]
        if now != gain:
            heapq.heapreplace(best_first, (now, i))
            continue
        heapq.heappop(best_first)
        missing -= sets[i]
        chosen.append(i)
    return sorted(chosen)
