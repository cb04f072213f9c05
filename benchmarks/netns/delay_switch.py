"""A switch whose links have a delay, as a process: `python delay_switch.py SECONDS NAME...`.

It makes a TAP device of every name in its network namespace and prints a line when they are there.
Who moves a device into another namespace has connected that to the switch: what is sent over the
device comes out of the one that has the frame's address, and of all others while nobody has had it,
the given time later and in order. It runs until it is killed, and the devices go with it.
"""

from __future__ import annotations

import collections
import contextlib
import fcntl
import os
import pathlib
import select
import struct
import sys
import time
from collections.abc import Iterator, Sequence

# linux/if_tun.h
_TUNSETIFF = 0x400454CA
_IFF_TAP = 0x0002
_IFF_NO_PI = 0x1000

MTU = 65_000  # bytes: fewer packets to carry; a TAP device takes up to 65,521
_FRAME_BYTES = MTU + 14  # with the Ethernet header
_FRAMES_AT_A_TIME = 16  # taken from one port before what is due elsewhere is looked at


def make_port(name: str) -> int:
    """Makes a TAP device in this process's namespace; it lives as long as the descriptor."""
    port = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    request = struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI)
    fcntl.ioctl(port, _TUNSETIFF, request)
    return port


def forward(ports: Sequence[int], delay: float) -> None:
    """Carries frames between the ports, each for `delay` seconds or a little more; for ever."""
    port_of: dict[bytes, int] = {}  # by the address of who has sent there
    on_the_way: collections.deque[tuple[float, int, bytes]] = collections.deque()
    while True:
        timeout = max(0.0, on_the_way[0][0] - time.monotonic()) if on_the_way else None
        # Not poll, whose timeout is in ms.
        for port in select.select(ports, [], [], timeout)[0]:
            for frame in _frames(port):
                port_of[frame[6:12]] = port
                on_the_way.append((time.monotonic() + delay, port, frame))
        while on_the_way and on_the_way[0][0] <= time.monotonic():
            _, source, frame = on_the_way.popleft()
            to = port_of.get(frame[:6])
            for port in ports if to is None else [to]:
                if port != source:
                    # As a switch does, it drops what a port does not take: one that is down.
                    with contextlib.suppress(OSError):
                        os.write(port, frame)


def _frames(port: int) -> Iterator[bytes]:
    for _ in range(_FRAMES_AT_A_TIME):
        try:
            yield os.read(port, _FRAME_BYTES)
        except BlockingIOError:
            return


def _be_punctual() -> None:
    """Has this process woken when it is to be: a wire does not wait for a core."""
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    # Else the kernel may let a timeout pass by 50 us (prctl(2), PR_SET_TIMERSLACK).
    pathlib.Path("/proc/self/timerslack_ns").write_text("1")


def main(argv: Sequence[str]) -> None:
    ports = [make_port(name) for name in argv[1:]]
    print("ready", flush=True)
    with contextlib.suppress(OSError):  # Late at times, then.
        _be_punctual()
    forward(ports, float(argv[0]))


if __name__ == "__main__":
    main(sys.argv[1:])
