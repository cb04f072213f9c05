"""Hosts on one machine: network namespaces around a switch, with links of a rate, or of a delay.

    with Network(["worker0", "ps0"], delay=0.001) as network:
        subprocess.Popen(network.command("worker0", ["python", ...]))
        network.limit("1gbit")

Every host is a namespace with one interface, `eth0`, whose other end is a port of a switch that has
a namespace to itself.

Without a delay the switch is the kernel's bridge. `tc tbf` (a token bucket) shapes both ends, so
that a host sends and gets at the rate, as over a full-duplex Ethernet link. A message takes what
the machine takes, tens of microseconds, plus its bytes over the rate.

With a delay the switch is a process (delay_switch.py), since `tc netem`, which would add one, is
not in many kernels, the one this was written on among them. A packet takes the delay from one host
to another, so that a round trip takes twice as much, and what the process takes. (Round trips of a
byte, medians on 2 cores: 0.06 ms over the bridge, 0.34 with a delay of 0, 2.5 with one of 1 ms.) A
rate then shapes what hosts send, not what they get: two that send to a third at once reach it at
twice the rate. The process takes time of a core that would do something else.

Nothing is made outside of these namespaces. They carry a prefix, and who makes a network removes
what a killed run has left under it, with the processes inside; a lock keeps runs apart.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from netns import delay_switch

_PREFIX = "het-tf-bench-"
_LOCK = pathlib.Path("/run/lock/het-tf-bench-netns")
_SWITCH = f"{_PREFIX}switch"
_BRIDGE = "bridge"
_SUBNET = "10.77.0"  # inside the namespaces only
_PORT = 2222

# More than one large packet: the kernel hands packets of up to 64 KiB to veth, as to a network card
# that cuts them itself. With a bucket smaller than that and the headers of the parts, tbf would cut
# them in software (at 1 Gbit/s that doubled the servers' CPU time).
_BURST_BYTES = 131_072
# What a port queues before it drops packets, in seconds of its rate; the buffer of a switch.
_QUEUE_SECONDS = 0.025
_QUEUE_BYTES_MIN = 2 * _BURST_BYTES


class NotPermittedError(Exception):
    """This process may not make network namespaces, or has not the programs for it."""


class InUseError(Exception):
    """Another run has its network up; there is one at a time."""


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Bytes of a host's interface, headers included, since it was made."""

    sent: int
    received: int


class Network:
    """Hosts by name, each a network namespace with an address of its own."""

    def __init__(self, hosts: Sequence[str], delay: float | None = None):
        """Describes the network; entering the context makes it.

        Args:
          hosts: at most 254 names of letters and digits.
          delay: seconds from host to host, 0 or more; None: as fast as the kernel's bridge.
        """
        self._hosts = list(hosts)
        self._delay = delay
        self._lock: int | None = None
        self._switch_process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Network:
        """Makes the network.

        Raises:
          NotPermittedError: not root, no `ip` or `tc`, or no right to make namespaces.
          InUseError: another run has a network now.
        """
        check_permitted()
        if self._delay is not None and not os.access("/dev/net/tun", os.R_OK | os.W_OK):
            raise NotPermittedError("a delay needs TAP devices: there is no /dev/net/tun")
        self._lock = _lock()
        try:
            _remove_all()
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        _remove_all()
        if self._switch_process is not None:
            self._switch_process.communicate()
            self._switch_process = None
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def address(self, host: str) -> str:
        """The "ip:port" that a server on the host listens on."""
        return f"{self._address_of(host)}:{_PORT}"

    def command(self, host: str, command: Sequence[str]) -> list[str]:
        """A command that runs `command` on the host, and dies with the thread that starts it."""
        return _command(_PREFIX + host, command)

    def limit(self, rate: str | None) -> None:
        """Sets the rate of every host: both ways, or, with a delay, of what it sends.

        Args:
          rate: as `tc` takes it, such as "1gbit" or "100mbit"; None: no limit.

        Raises:
          ValueError: tc does not know the rate.
        """
        ends = [(_PREFIX + host, "eth0") for host in self._hosts]
        if self._delay is None:
            ends += [(_SWITCH, host) for host in self._hosts]
        for namespace, device in ends:
            qdisc = ["qdisc", "replace", "dev", device, "root"]
            if rate is None:
                _tc(namespace, [*qdisc, "noqueue"])
                continue
            queue = max(_QUEUE_BYTES_MIN, int(bits_per_second(rate) / 8 * _QUEUE_SECONDS))
            shape = ["tbf", "rate", rate, "burst", str(_BURST_BYTES), "limit", str(queue)]
            _tc(namespace, [*qdisc, *shape])

    def traffic(self) -> dict[str, Traffic]:
        """What every host has sent and received.

        The counters of /sys/class/net/*/statistics, of `eth0`. Headers are those of the packets
        that the kernel handed over (up to 64 KiB each); cut to 1,500 bytes on a real wire, packets
        would add 4 % to bulk data. What a host sends again because a queue was full counts again.
        """
        return {host: _traffic(_PREFIX + host) for host in self._hosts}

    def _address_of(self, host: str) -> str:
        return f"{_SUBNET}.{1 + self._hosts.index(host)}"

    def _make(self) -> None:
        _ip(["netns", "add", _SWITCH])
        for host in self._hosts:
            _ip(["netns", "add", _PREFIX + host])
        if self._delay is None:
            self._connect_to_bridge()
        else:
            self._connect_to_process(self._delay)
        for host in self._hosts:
            namespace = _PREFIX + host
            _ip(["-n", namespace, "address", "add", f"{self._address_of(host)}/24", "dev", "eth0"])
            for device in ("lo", "eth0"):
                _ip(["-n", namespace, "link", "set", device, "up"])

    def _connect_to_bridge(self) -> None:
        """Makes every host's eth0, the end of a veth pair."""
        _ip(["-n", _SWITCH, "link", "add", _BRIDGE, "type", "bridge"])
        _ip(["-n", _SWITCH, "link", "set", _BRIDGE, "up"])
        for host in self._hosts:
            pair = ["link", "add", "eth0", "netns", _PREFIX + host, "type", "veth"]
            _ip([*pair, "peer", "name", host, "netns", _SWITCH])
            _ip(["-n", _SWITCH, "link", "set", host, "master", _BRIDGE, "up"])

    def _connect_to_process(self, delay: float) -> None:
        """Makes every host's eth0, a TAP device."""
        command = [sys.executable, "-I", delay_switch.__file__, str(delay), *self._hosts]
        self._switch_process = subprocess.Popen(
            _command(_SWITCH, command), stdout=subprocess.PIPE, text=True
        )
        assert self._switch_process.stdout is not None
        if not self._switch_process.stdout.readline():
            raise RuntimeError(f"the switch has ended with status {self._switch_process.wait()}")
        for host in self._hosts:
            move = ["link", "set", host, "netns", _PREFIX + host, "name", "eth0"]
            _ip(["-n", _SWITCH, *move, "mtu", str(delay_switch.MTU)])


def bits_per_second(rate: str) -> float:
    """The rate that tc's "100mbit" or "1gbit" is.

    Raises:
      ValueError: it is none of bit, kbit, mbit and gbit.
    """
    for unit, factor in (("gbit", 1e9), ("mbit", 1e6), ("kbit", 1e3), ("bit", 1.0)):
        number = rate.lower().removesuffix(unit)
        if number != rate.lower():
            return float(number) * factor
    raise ValueError(f"a rate is such as 100mbit or 1gbit, not {rate!r}")


def seconds(delay: str) -> float:
    """The time that "1ms" or "200us" is.

    Raises:
      ValueError: it is none of s, ms and us, or negative.
    """
    for unit, factor in (("us", 1e-6), ("ms", 1e-3), ("s", 1.0)):
        number = delay.removesuffix(unit)
        if number != delay and float(number) >= 0:
            return float(number) * factor
    raise ValueError(f"a delay is such as 1ms or 200us, not {delay!r}")


def check_permitted() -> None:
    """Returns if this process may make a network.

    Raises:
      NotPermittedError: not root, no `ip` or `tc`, or no right to make namespaces.
    """
    if os.geteuid() != 0:
        raise NotPermittedError("network namespaces need root: run it with sudo")
    missing = [program for program in ("ip", "tc", "setpriv") if shutil.which(program) is None]
    if missing:
        raise NotPermittedError(f"needs {', '.join(missing)}: apt-get install iproute2 util-linux")
    probe = f"{_PREFIX}probe"
    try:
        _ip(["netns", "add", probe])
        _ip(["netns", "delete", probe])
    except RuntimeError as error:
        raise NotPermittedError(f"may not make a network namespace here: {error}") from error


def _lock() -> int:
    """Takes the lock that says that these namespaces are in use; it ends with this process."""
    _LOCK.parent.mkdir(parents=True, exist_ok=True)
    lock = os.open(_LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise InUseError(f"another run has its network up: it holds {_LOCK}") from None
    return lock


def _remove_all() -> None:
    """Removes the namespaces of the prefix; their interfaces go with them."""
    names = [each["name"] for each in json.loads(_ip(["-json", "netns", "list"]) or "[]")]
    names = [name for name in names if name.startswith(_PREFIX)]
    for name in names:
        _kill_all(name)
    for name in names:
        _ip(["netns", "delete", name])


def _kill_all(namespace: str) -> None:
    """Kills what runs in a namespace, and waits until it is gone: it would keep the interfaces."""
    for _ in range(100):
        processes = _ip(["netns", "pids", namespace]).split()
        if not processes:
            return
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(process), signal.SIGKILL)
        time.sleep(0.05)
    raise RuntimeError(f"processes of namespace {namespace} do not end: {processes}")


def _command(namespace: str, command: Sequence[str]) -> list[str]:
    return [
        *("ip", "netns", "exec", namespace),
        *("setpriv", "--pdeathsig", "KILL", *command),
    ]


def _traffic(namespace: str) -> Traffic:
    show = ["-n", namespace, "-statistics", "-json", "link", "show", "dev", "eth0"]
    (eth0,) = json.loads(_ip(show))
    return Traffic(eth0["stats64"]["tx"]["bytes"], eth0["stats64"]["rx"]["bytes"])


def _ip(arguments: Sequence[str]) -> str:
    return _run(["ip", *arguments])


def _tc(namespace: str, arguments: Sequence[str]) -> None:
    _run(["tc", "-n", namespace, *arguments])


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
