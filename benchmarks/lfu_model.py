"""The policy that caches had before admission, as a model to compare hit rates with.

Every key looked up got a line. A use added 2^(time / half-life) to the line's score, time counted
in keys looked up, half-life 4 capacities. When lines exceeded the capacity, the lowest scores left:
found by a scan that collected the lowest sixteenth of the capacity, used up before the next scan;
one that was used since was passed over, and so was a line of the present step.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_HALF_LIFE_IN_CAPACITIES = 4
_MAX_AGE = 500  # half-lives until scores are scaled back


def hit_rate(steps: Sequence[np.ndarray], num_keys: int, capacity: int) -> float:
    """Share of the keys looked up that had a line.

    Args:
      steps: the distinct keys of every step, each in [0, num_keys).
      num_keys: how many there may be.
      capacity: lines.
    """
    score = np.zeros(num_keys)
    resident = np.zeros(num_keys, bool)
    lines = 0
    hits = 0
    time = origin = 0
    candidates: list[tuple[float, int]] = []  # the lowest is last
    for keys in steps:
        time += len(keys)
        age = (time - origin) / (_HALF_LIFE_IN_CAPACITIES * capacity)
        if age > _MAX_AGE:
            score *= 2.0**-age
            origin, age = time, 0.0
            candidates.clear()
        found = int(resident[keys].sum())
        hits += found
        lines += len(keys) - found
        score[keys] = np.where(resident[keys], score[keys], 0) + 2.0**age
        resident[keys] = True
        excess = lines - capacity
        if excess <= 0:
            continue
        held = set(keys.tolist())
        scanned = False
        while excess > 0:
            if not candidates:
                if scanned:
                    break
                scanned = True
                candidates = _lowest(score, resident, keys, max(excess, capacity // 16))
                continue
            lowest, key = candidates.pop()
            if not resident[key] or key in held or score[key] != lowest:
                continue
            resident[key] = False
            lines -= 1
            excess -= 1
    return hits / sum(len(keys) for keys in steps)


def _lowest(
    score: np.ndarray, resident: np.ndarray, held: np.ndarray, wanted: int
) -> list[tuple[float, int]]:
    resident = resident.copy()
    resident[held] = False
    (may_go,) = np.nonzero(resident)
    if wanted < len(may_go):
        may_go = may_go[np.argpartition(score[may_go], wanted)[:wanted]]
    may_go = may_go[np.argsort(-score[may_go], kind="stable")]
    return list(zip(score[may_go].tolist(), may_go.tolist(), strict=True))
