"""Bytes that local processes sent each other over TCP, as the kernel counts them.

For every socket the kernel keeps tcpi_bytes_received (tcp(7), TCP_INFO): payload that arrived, in
order, without headers and without what was sent twice. `ss` of iproute2 prints it, and whose
sockets they are. It needs no privilege for processes of one's own.
"""

from __future__ import annotations

import collections
import re
import subprocess
from collections.abc import Collection

_COMMAND = ("ss", "--tcp", "--info", "--numeric", "--processes", "--oneline", "--no-header")
# State, queues, own address, peer's address, owner, the rest.
_SOCKET = re.compile(r"^ESTAB\s+\d+\s+\d+\s+(\S+)\s+(\S+)\s+users:\(\(.*?pid=(\d+),")
# An IPv4 connection of an IPv6 socket; the other end may print plain IPv4.
_MAPPED = re.compile(r"\[::ffff:([\d.]+)\]")
_RECEIVED = re.compile(r"\bbytes_received:(\d+)")

Connection = tuple[str, str]  # own address, peer's address


def received(receivers: Collection[int], senders: Collection[int]) -> dict[Connection, int]:
    """Bytes that processes have received from others, on each connection that is open now.

    Args:
      receivers: process ids.
      senders: process ids.

    Returns:
      A count for every connection, by the receiver's end.

    Raises:
      RuntimeError: there is no `ss`, or it does not tell.
    """
    owner: dict[Connection, int] = {}
    count: dict[Connection, int] = {}
    for line in _list_sockets():
        socket = _SOCKET.match(_MAPPED.sub(r"\1", line))
        if socket is None:  # not established, or another user's
            continue
        ends = socket[1], socket[2]
        owner[ends] = int(socket[3])
        bytes_received = _RECEIVED.search(line)
        count[ends] = int(bytes_received[1]) if bytes_received else 0
    return {
        (own, peer): count[own, peer]
        for (own, peer), process in owner.items()
        if process in receivers and owner.get((peer, own)) in senders
    }


def growth(before: dict[Connection, int], after: dict[Connection, int]) -> int:
    """Bytes received between two results of `received`.

    Raises:
      RuntimeError: a connection was closed in between, so its last bytes are not known.
    """
    closed = before.keys() - after.keys()
    if closed:
        raise RuntimeError(f"connections were closed while their bytes were counted: {closed}")
    difference = collections.Counter(after)
    difference.subtract(before)
    return difference.total()


def _list_sockets() -> list[str]:
    try:
        return subprocess.run(
            _COMMAND, check=True, capture_output=True, text=True
        ).stdout.splitlines()
    except FileNotFoundError as error:
        raise RuntimeError("counting needs `ss`: apt-get install iproute2") from error
