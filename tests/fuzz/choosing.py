"""Which experts each choice takes, by its definition: Python's own floats and lists, token by token.

Every function returns a list of the experts of each token, -1 for an empty slot, and raises `Ambiguous` where
two numbers that are compared are nearer than float32 can tell.  Equal logits are equal in any dtype.
"""

import itertools
import math

from .hold import Ambiguous

NEAR = 4e-6


def apart(a: float, b: float) -> None:
    if a != b and math.isfinite(a - b) and abs(a - b) <= NEAR * max(0.01, abs(a), abs(b)):
        raise Ambiguous


def top(values: list[float], k: int, ordered: bool = True, ties: bool = True) -> list[int]:
    """The k highest, of equal ones the lower number first.

    Unless `ordered` it matters only which they are.  Unless `ties` equal values may be rounded apart, as of
    two tokens are: torch's sigmoid on a CPU is another at the end of a row's memory.
    """
    order = sorted(range(len(values)), key=lambda e: (-values[e], e))
    pairs = list(itertools.pairwise(order[: k + 1]))
    for a, b in pairs if ordered else pairs[k - 1 :]:
        apart(values[a], values[b])
        if not ties and values[a] == values[b] and math.isfinite(values[a]):
            raise Ambiguous
    return order[:k]


def highest(row: list[float], chosen: set[int], slots: int) -> list[int]:
    """The best `slots` of the chosen experts of a token."""
    masked = [value if e in chosen else -math.inf for e, value in enumerate(row)]
    ids = [e for e in top(masked, slots) if e in chosen]
    return ids + [-1] * (slots - len(ids))


def group_limit(rows, k, num_groups, top_groups, score, masked):
    out = []
    for row in rows:
        size = len(row) // num_groups
        groups = [row[g * size : (g + 1) * size] for g in range(num_groups)]
        best = [max(g) if score == "max" else sum(sorted(g)[-2:]) for g in groups]
        kept = top(best, top_groups)
        out.append(top([v if e // size in kept else masked for e, v in enumerate(row)], k))
    return out


def top_p(rows, scores, k, p):
    out = []
    for row, score in zip(rows, scores, strict=True):
        ids, before, kept = top(row, k), 0.0, []
        for j, e in enumerate(ids):
            apart(before, p * sum(score))
            kept.append(e if j == 0 or before < p * sum(score) else -1)
            before += score[e]
        out.append(kept)
    return out


def log_sum_exp(values: list[float]) -> float:
    most = max(values)
    return most + math.log(sum(math.exp(v - most) for v in values))


def sinkhorn(logits, k, iterations, mask):
    tokens = [row for row, seen in zip(logits, mask, strict=True) if seen]
    E = len(logits[0]) if logits else 0
    v = [0.0] * E
    for _ in range(iterations if tokens else 0):
        u = [-log_sum_exp([z + b for z, b in zip(row, v, strict=True)]) for row in tokens]
        v = [-log_sum_exp([row[e] + u[t] for t, row in enumerate(tokens)]) for e in range(E)]
    return [top([z + b for z, b in zip(row, v, strict=True)], k, ties=False) for row in logits]


def expert_choice(rows, k, slots, mask):
    T, E = len(rows), len(rows[0]) if rows else 0
    capacity = -(-sum(mask) * k // E) if T else 0
    taken = [set() for _ in rows]
    for e in range(E):
        column = [row[e] if seen else -math.inf for row, seen in zip(rows, mask, strict=True)]
        for t in top(column, capacity, False, False):
            taken[t].add(e)
    return [highest(row, taken[t], slots or E) for t, row in enumerate(rows)]


def token_rounding(rows, weights, k, choice, mask):
    """The k slots of a token that it keeps, then those that are added."""
    E = len(rows[0]) if rows else 0
    own = [top(row, k) for row in rows]
    seen = [t for t in range(len(rows)) if mask[t]]
    kept = [set() for _ in rows]
    for e in range(E):
        chose = [t for t in seen if e in own[t]]
        others = [t for t in seen if e not in own[t]]
        tile = choice.tile
        rest = {"down": 0, "up": tile - 1, "nearest": tile // 2}[choice.to]
        target = (len(chose) + rest) // tile * tile
        target = target if target <= len(seen) else len(chose)
        by_weight = top([weights[t][own[t].index(e)] for t in chose], target, False, False)
        more = max(target - len(chose), 0)
        by_score = top([rows[t][e] for t in others], more, False, False)
        first, then = [chose[i] for i in by_weight], [others[i] for i in by_score]
        for t in (first + then)[:target]:
            kept[t].add(e)
    slots = 0 if choice.to == "down" else choice.max_added or E - k
    out = []
    for t, row in enumerate(rows):
        added = highest(row, kept[t] - set(own[t]), slots) if slots else []
        out.append([e if e in kept[t] else -1 for e in own[t]] + added)
    return out


def over_capacity(ids, weights, rows, tokens, capacity, real):
    """Drop what is behind the first ceil(factor * T * k / E) choices of the `real` experts; T is `tokens`."""
    experts = len(rows[0])
    k = len(ids[0]) if ids else 0
    limit = math.ceil(capacity.factor * tokens * k / experts)
    out = [list(row) for row in ids]
    for e in range(real):  # `rows` are what the weights of each token come from
        places = [(t, j) for t, row in enumerate(ids) for j, chosen in enumerate(row) if chosen == e]
        kept = set(range(min(limit, len(places))))
        if capacity.drop == "probability":
            values = [weights[t][j] for t, j in places]
            kept = set(top(values, limit, False, False))
        for i, (t, j) in enumerate(places):
            if i not in kept:
                out[t][j] = -1
    return out
