"""The programs in benchmarks/ run, and what they count is right. Times are not looked at."""

from __future__ import annotations

import json
import os
import pathlib
import re
import shutil
import socket
import subprocess
import sys

import pytest

_BENCHMARKS = pathlib.Path(__file__).resolve().parents[2] / "benchmarks"

needs_ss = pytest.mark.skipif(shutil.which("ss") is None, reason="needs ss of iproute2")


def _run(program: str, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(_BENCHMARKS / program), *flags],
        capture_output=True,
        text=True,
        timeout=1500,
    )


@needs_ss
def test_tcp_bytes_are_those_that_were_sent(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(_BENCHMARKS)
    import tcp_bytes

    def received() -> dict[tcp_bytes.Connection, int]:
        return tcp_bytes.received(receivers=[os.getpid()], senders=[os.getpid()])

    with socket.create_server(("127.0.0.1", 0)) as server:
        before = received()
        with socket.create_connection(server.getsockname()) as client, server.accept()[0] as peer:
            client.sendall(bytes(100_000))
            peer.recv(100_000, socket.MSG_WAITALL)
            middle = received()
            assert tcp_bytes.growth(before, middle) == 100_000
            peer.sendall(bytes(7))
            client.recv(7, socket.MSG_WAITALL)
            assert tcp_bytes.growth(middle, received()) == 7
            assert tcp_bytes.received(receivers=[os.getpid()], senders=[os.getppid()]) == {}
        with pytest.raises(RuntimeError, match="closed"):
            tcp_bytes.growth(middle, received())


@needs_ss
def test_bytes_fall_with_staleness_and_the_kernel_agrees(tmp_path: pathlib.Path):
    done = _run(
        "cluster_bytes.py",
        "--ids=2048",
        "--rows=20000",
        "--dim=64",
        "--capacity=8000",
        "--steps=160",
        "--warmup=60",
        "--staleness=0,3,unbounded",
        f"--json={tmp_path / 'figures.json'}",
    )
    # Also that the two counts are within 10 %.
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    *runs, idle = json.loads((tmp_path / "figures.json").read_text())
    assert [run["mode"] for run in runs] == ["no cache", "s=0", "s=3", "s=unbounded"]
    totals = [run["up"] + run["down"] for run in runs]
    assert totals == sorted(totals, reverse=True)
    assert totals[-1] < 0.6 * totals[0]
    no_cache, *cached = runs
    assert no_cache["hits"] == no_cache["stale_hits"] == 0
    assert all(run["hits"] > 0.5 for run in cached)
    stale_hits = [run["stale_hits"] for run in cached]
    assert stale_hits[0] > stale_hits[1] > stale_hits[2] == 0
    # What TensorFlow sends where het_tf sends nothing.
    assert idle["kernel_up"] + idle["kernel_down"] < 0.05 * totals[0]


def test_table_memory():
    done = _run("table_memory.py", "--rows=3000000", "--limit=1.6")
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    peak = re.search(r"peak resident.* ([0-9.]+)$", done.stdout, re.MULTILINE)
    assert peak
    assert 1.0 < float(peak[1]) <= 1.6
