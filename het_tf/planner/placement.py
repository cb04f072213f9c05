"""Which parameter servers store which table.

A table is on one server, or divided over several by a hash of its keys. Divided tables load all
servers alike, but every server gets a part of every request for them. Each part costs time, and
each message to a server does. Tables on one server need fewer parts, but large ones would make a
server the bottleneck. (AutoShard: Zha et al., KDD 2022, searches placements of whole tables.)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

# Tables with a larger share of a server's mean load, or of its memory, are divided. One candidate
# for each number.
_SHARES = (0.1, 0.3, 1.0, 3.0, np.inf)
# Of a server's memory, for candidates that fill some servers more than others. More rows will come.
_FILLED = 0.7
_SPREADS = (0.0,) + 10 * (0.1, 0.3, 1.0)  # of the random orders


@dataclasses.dataclass(frozen=True)
class TableLoad:
    """What a table costs the servers together, wherever it is.

    Attributes:
      seconds: time that a step's messages for the table take servers and their networks.
      num_bytes: memory.
      servers: servers that store the table. None: to be chosen.
    """

    seconds: float
    num_bytes: float
    servers: tuple[int, ...] | None = None


def placements(
    tables: Sequence[TableLoad], servers: int, room: float
) -> Iterator[list[tuple[int, ...]]]:
    """Yields candidates: the servers of every table. The first has all tables on all servers.

    Args:
      tables: the tables.
      servers: number of servers.
      room: memory of a server, in bytes. Only the first candidate may need more. The others need at
        most 0.7 of the room, or all of it if the servers are fuller on average.
    """
    load = np.array([table.seconds for table in tables])
    memory = np.array([table.num_bytes for table in tables])
    is_free = np.array([table.servers is None for table in tables])
    if memory.sum() <= _FILLED * servers * room:
        room *= _FILLED
    for used in _sizes(servers):
        every = tuple(range(used))
        divided = [table.servers or every for table in tables]
        if used == servers or _fits(divided, memory, servers, room):
            yield divided
        known = {0}  # Numbers of whole tables.
        for share in _SHARES:
            is_whole = is_free & (load <= share * max(load.sum(), 1e-300) / used)
            is_whole &= memory <= min(share, 1.0) * room
            whole = np.flatnonzero(is_whole)
            if used == 1 or len(whole) in known:
                continue
            known.add(len(whole))
            base_load, base_memory = np.zeros(servers), np.zeros(servers)
            for number in np.flatnonzero(~is_whole):
                mine = list(divided[number])
                base_load[mine] += load[number] / len(mine)
                base_memory[mine] += memory[number] / len(mine)
            left = np.where(np.arange(servers) < used, room - base_memory, -1.0)
            owners = balanced(load[whole], memory[whole], base_load, left)
            if owners is not None:
                of_whole = dict(zip(whole.tolist(), owners.tolist(), strict=True))
                placed = [
                    (of_whole[number],) if number in of_whole else mine
                    for number, mine in enumerate(divided)
                ]
                if _fits(placed, memory, servers, room):
                    yield placed


def _sizes(servers: int) -> list[int]:
    """Returns how many of the servers store tables whose servers are free: all, and fewer."""
    return [servers, *(2**p for p in range(servers.bit_length() - 1, -1, -1) if 2**p < servers)]


def _fits(placed: Sequence[tuple[int, ...]], memory: np.ndarray, servers: int, room: float) -> bool:
    used = np.zeros(servers)
    for mine, num_bytes in zip(placed, memory, strict=True):
        used[list(mine)] += num_bytes / len(mine)
    return bool(np.all(used <= room))


def balanced(
    load: np.ndarray, memory: np.ndarray, base: np.ndarray, room: np.ndarray
) -> np.ndarray | None:
    """Returns the server of every table so that the busiest server has little load.

    Tables are placed in an order, each on the server with the least load that has room. Then tables
    move from the busiest server, or change places with tables elsewhere, as long as the busiest
    server gets less. The best of several orders is taken: by load, memory, their product and their
    ratio, and random ones, in which large tables tend to be first.

    Args:
      load: float64 [tables].
      memory: float64 [tables], bytes.
      base: float64 [servers], load that is there already.
      room: float64 [servers], bytes.

    Returns:
      int64 [tables]. None: the search has found no placement for which there is room.
    """
    shares = load / max(load.sum(), 1e-300), memory / max(memory.sum(), 1e-300)
    orders = [shares[0], shares[1], shares[0] * shares[1], shares[0] / (shares[1] + 1e-300)]
    rng = np.random.default_rng(0)
    orders += [sum(shares) * rng.lognormal(0, spread, len(load)) for spread in _SPREADS]
    best, least = None, np.inf
    for order in orders:
        found = _placed(load, memory, base, room, np.argsort(-order, kind="stable"))
        if found is not None and found[1].max() < least:
            best, least = found[0], found[1].max()
    return best


def _placed(
    load: np.ndarray, memory: np.ndarray, base: np.ndarray, room: np.ndarray, order: np.ndarray
) -> tuple[np.ndarray, np.ndarray] | None:
    """Returns the owners of the tables and the loads of the servers, from one order of tables."""
    owners = np.zeros(len(load), np.int64)
    loads, room = base.astype(np.float64), room.astype(np.float64)
    for table in order:
        fitting = np.where(memory[table] <= room, loads, np.inf)
        server = int(np.argmin(fitting))
        if fitting[server] == np.inf:
            return None
        owners[table] = server
        loads[server] += load[table]
        room[server] -= memory[table]
    while _improve(load, memory, owners, loads, room):
        pass
    return owners, loads


def _improve(
    load: np.ndarray, memory: np.ndarray, owners: np.ndarray, loads: np.ndarray, room: np.ndarray
) -> bool:
    """Makes the best move or exchange from the busiest server. Returns whether there is one."""
    busiest = int(np.argmax(loads))
    mine = np.flatnonzero(owners == busiest)
    others = np.flatnonzero(owners != busiest)
    # A table that leaves, and what comes instead: nothing, for each server, or a table.
    goal = np.concatenate([np.arange(len(loads)), owners[others]])
    back_load = np.concatenate([np.zeros(len(loads)), load[others]])
    back_memory = np.concatenate([np.zeros(len(loads)), memory[others]])
    change = load[mine, np.newaxis] - back_load
    more = memory[mine, np.newaxis] - back_memory
    after = np.maximum(loads[busiest] - change, loads[goal] + change)
    after[(more > room[goal]) | (-more > room[busiest])] = np.inf
    after[:, goal == busiest] = np.inf
    if not after.size:
        return False
    leaving, coming = np.unravel_index(np.argmin(after), after.shape)
    if after[leaving, coming] >= loads[busiest] * (1 - 1e-9):
        return False
    server = goal[coming]
    if coming >= len(loads):
        owners[others[coming - len(loads)]] = busiest
    owners[mine[leaving]] = server
    for array, moved in ((loads, change), (room, -more)):
        array[busiest] -= moved[leaving, coming]
        array[server] += moved[leaving, coming]
    return True
