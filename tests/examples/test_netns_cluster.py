"""benchmarks/netns_cluster.py: its data, its figures, its network, and small runs of it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from types import ModuleType

import numpy as np
import program_runner
import pytest

_BENCHMARKS = pathlib.Path(__file__).resolve().parents[2] / "benchmarks"
_PROGRAM = str(_BENCHMARKS / "netns_cluster.py")
_SMALL = (
    *("--steps=8", "--epochs=2", "--steps_per_execution=4", "--batch=32", "--held_out=1024"),
    *("--dim=16", "--hidden=16", "--dense_staleness=default"),
)


@pytest.fixture(autouse=True)
def _find_benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(_BENCHMARKS)


@pytest.fixture
def network() -> ModuleType:
    """The module, where networks may be made."""
    from netns import network

    try:
        with network.Network([]):
            return network
    except (network.NotPermittedError, network.InUseError) as error:
        pytest.skip(str(error))


def _run(*flags: str, **env: str) -> subprocess.CompletedProcess[str]:
    return program_runner.run(_PROGRAM, *_SMALL, *flags, env=os.environ | env)


def test_ids_have_the_shape_of_criteos():
    from netns import criteo_shape

    assert criteo_shape.KEYS == 527_550
    generator = criteo_shape.Generator(seed=3)
    clicks = generator.draw(20_000, stream=0)
    fields = clicks.ids - criteo_shape.OFFSETS
    assert fields.min() == 0
    assert ((fields.max(axis=0) < criteo_shape.CARDINALITIES) & (fields.max(axis=0) > 0)).all()
    # One key in ten makes up most of the ids, and a batch repeats more than half of its.
    counts = np.sort(np.bincount(clicks.ids.ravel(), minlength=criteo_shape.KEYS))[::-1]
    assert counts[: criteo_shape.KEYS // 10].sum() > 0.9 * counts.sum()
    assert len(np.unique(clicks.ids[:128])) < 0.5 * 128 * criteo_shape.FIELDS
    # Columns go together: a rare value of one large column nearly tells that of another.
    first, second = fields[:, 2], fields[:, 11]
    values, places, sizes = np.unique(first, return_inverse=True, return_counts=True)
    some = np.flatnonzero((sizes >= 5) & (values > 1000))
    shares = [np.unique(second[places == v], return_counts=True)[1].max() / sizes[v] for v in some]
    assert len(some) > 50
    assert np.mean(shares) > 0.4
    assert 0.22 < clicks.labels.mean() < 0.28
    assert 0.78 < clicks.best_auc < 0.86

    again = criteo_shape.Generator(seed=3)
    np.testing.assert_array_equal(again.draw(20_000, stream=0).ids, clicks.ids)
    assert (again.draw(20_000, stream=1).ids != clicks.ids).mean() > 0.5
    assert (criteo_shape.Generator(seed=4).draw(20_000, stream=0).ids != clicks.ids).mean() > 0.5


def test_workers_share_the_batches(tmp_path: pathlib.Path):
    from netns import criteo_shape, wide_deep
    from netns.job import Job

    clicks = criteo_shape.Generator(seed=1).draw(8 * 6 + 5, stream=0)
    path = tmp_path / "batches"
    criteo_shape.write_batches(clicks, 8, path)
    job = Job(
        **{"train": str(path), "held_out": str(path), "epochs": 1, "steps": 6, "workers": 2},
        **{"worker": 0, "steps_per_execution": 1, "batch": 8, "dim": 4, "hidden": (4,), "seed": 1},
        **{"learning_rate": 0.1, "row_optimizer": "adagrad", "cache": None, "strategy": {}},
        wire_dtype="float32",
    )
    assert Job.from_json(job.to_json()) == job
    for worker in range(2):
        batches = list(wide_deep.worker_data(job, worker).take(4).as_numpy_iterator())
        for number, (ids, labels) in enumerate(batches):
            first = 8 * (2 * (number % 3) + worker)  # endless: the fourth is the first
            np.testing.assert_array_equal(ids, clicks.ids[first : first + 8])
            np.testing.assert_array_equal(labels[:, 0], clicks.labels[first : first + 8])

    held_out = wide_deep.HeldOut(job)
    rng = np.random.default_rng(1)
    rows = rng.normal(size=(len(held_out.keys), 4)).astype(np.float32)
    kernel = np.zeros((4 * criteo_shape.FIELDS, 1), np.float32)
    wide = rows[np.searchsorted(held_out.keys, clicks.ids[:48]), 0].sum(axis=1)
    auc = held_out.auc(rows, [(kernel, np.zeros(1, np.float32))])
    positive = clicks.labels[:48] == 1
    assert auc == np.mean(np.subtract.outer(wide[positive], wide[~positive]) > 0)


def test_figures():
    from netns import runs
    from netns.measure import Epoch

    sizes = runs.Sizes(3, 10, 5, 100, 4, (4,), 10, 100, 0.1, "adagrad")
    setting = runs.Setting("s100", 2, 1, "1gbit", "default", None, 1, sizes)

    def epoch(seconds: float, auc: float, factor: float = 1) -> Epoch:
        moved = {"worker0": 30_000, "worker1": 50_000, "ps0": 1_000_000, "chief": 9}
        cpu = {"worker0": 0.2 * factor, "worker1": 0.4 * factor, "ps0": 0.1, "chief": 5.0}
        counters = {"bytes_up": 10_000, "bytes_down": 6_000, "messages": 40}
        counters |= {"lookahead_steps": 20, "lookahead_waited_steps": 5}
        counters |= {"lookahead_waited_seconds": 0.5 * seconds}
        return Epoch(seconds, moved, moved, cpu, 0.5, counters, 1_000, auc)

    own = runs.Run(setting, [epoch(9, 0.6), epoch(1, 0.7), epoch(3, 0.8)])
    alone = runs.Run(setting.alone(), [epoch(1, 0.6, 0.5)] * 3)
    assert runs.Run.from_dict(json.loads(json.dumps(own.to_dict()))) == own
    row, _ = runs.figures([own, alone])
    assert row.ms_per_step == 200  # 2 s for 10 steps of each worker
    assert row.examples_per_s == 1000
    assert (row.kb_sent, row.kb_received) == (4, 4)
    assert row.kb == pytest.approx({"embeddings": 0.8, "dense": 2, "rest": 5.2})
    assert (row.compute_ms, row.worker_ms, row.server_ms) == pytest.approx((15, 30, 5))
    shares = {"compute": 0.075, "messages": 0.075, "waiting": 0.85}
    assert row.shares() == pytest.approx(shares)
    assert row.messages == 2
    assert row.waited == 0.25
    assert row.waited_ms == 50  # 1 s for 20 steps of both workers
    assert row.examples == [2000, 4000, 6000]
    assert row.seconds_to(0.6) == pytest.approx(2)
    assert row.seconds_to(0.65) == pytest.approx(3)
    assert row.seconds_to(0.9) is None

    for each in own.epochs:
        each.counters |= {"dense_bytes_up": 50_000, "dense_bytes_down": 30_000}
    row, _ = runs.figures([own, alone])
    assert row.kb == pytest.approx({"embeddings": 0.8, "dense": 4, "rest": 3.2})
    no_ahead = runs.Run(dataclasses.replace(setting, lookahead=0), own.epochs)
    assert runs.figures([no_ahead])[0].waited is None


@pytest.mark.exhaustive
def test_says_what_it_may_not_do():
    done = _run("--variants=no_cache", PATH="/nonexistent")
    assert done.returncode == os.EX_NOPERM
    assert "needs" in done.stderr
    bad = ("variants=nobody", "rates=fast", "dense_staleness=x", "steps=9", "held_out=100")
    for flag in (*bad, "delay=late"):
        done = _run(f"--{flag}")
        assert done.returncode == os.EX_USAGE, done.stderr[-2000:]
        name, _, value = flag.partition("=")
        assert value in done.stderr or f"--{name}" in done.stderr


@pytest.mark.exhaustive
def test_workers_alone_need_no_network(tmp_path: pathlib.Path):
    files = [f"--{name}={tmp_path / name}" for name in ("json", "table")]
    flags = ("--variants=alone", *files, f"--plot={tmp_path / 'plot.png'}")
    done = _run(*flags)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    (run,) = json.loads((tmp_path / "json").read_text())
    assert [list(epoch["cpu_seconds"]) for epoch in run["epochs"]] == [["worker0", "worker1"]] * 2
    assert all(0.4 < epoch["auc"] < 1 for epoch in run["epochs"])
    assert "each worker alone" in (tmp_path / "table").read_text()
    assert (tmp_path / "plot.png").stat().st_size > 0
    assert _run(*flags).returncode == 0
    assert json.loads((tmp_path / "json").read_text()) == [run]  # not made again: its times


# Says how many bytes TCP sent again (tcpi_bytes_retrans of Linux's tcp_info), as it does where a
# busy machine answers late.
_SEND = """
import socket, struct, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2]))) as connection:
    connection.sendall(bytes(2_000_000))
    connection.shutdown(socket.SHUT_WR)
    connection.recv(1)
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    print(*struct.unpack_from("=Q", info, 208))
"""
_RECEIVE = """
import socket, sys
with socket.create_server(("", int(sys.argv[2]))) as server:
    while True:
        print("listens", flush=True)
        with server.accept()[0] as connection:
            while connection.recv(1 << 16):
                pass
"""


@contextlib.contextmanager
def _receiver(network: ModuleType, hosts: object, program: str = _RECEIVE) -> Iterator[list[str]]:
    address = hosts.address("ps0").split(":")
    command = hosts.command("ps0", [sys.executable, "-c", program, *address])
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "listens\n"
            yield address
        finally:  # Popen waits for it, also after a failure.
            process.kill()


@pytest.mark.exhaustive
@pytest.mark.parametrize("delay", [None, 0.001])
def test_hosts_send_at_the_rate_and_are_counted(network: ModuleType, delay: float | None):
    with (
        network.Network(["worker0", "ps0", "chief"], delay) as hosts,
        _receiver(network, hosts) as address,
    ):
        seconds = {}
        for rate in (None, "100mbit", "10gbit"):
            hosts.limit(rate)
            before = hosts.traffic()
            began = time.monotonic()
            command = hosts.command("worker0", [sys.executable, "-c", _SEND, *address])
            said = subprocess.run(command, check=True, timeout=60, stdout=subprocess.PIPE)
            seconds[rate] = time.monotonic() - began
            after = hosts.traffic()
            sent = after["worker0"].sent - before["worker0"].sent
            assert 2_000_000 < sent - int(said.stdout) < 2_200_000
            assert after["ps0"].received - before["ps0"].received == pytest.approx(sent, abs=1000)
            assert after["chief"].sent - before["chief"].sent < 1000
        assert seconds["100mbit"] > 0.15
        assert network.bits_per_second("100mbit") == 1e8
        with pytest.raises(network.InUseError), network.Network(["other"]):
            pass


_ANSWER_DIGESTS = """
import hashlib, socket, sys
with socket.create_server(("", int(sys.argv[2]))) as server:
    print("listens", flush=True)
    while True:
        with server.accept()[0] as connection:
            digest = hashlib.sha256()
            while part := connection.recv(1 << 16):
                digest.update(part)
            connection.sendall(digest.digest())
"""
_ASK_FOR_DIGESTS = """
import hashlib, os, socket, sys, time
sent = os.urandom(3_000_000)
for n in (0, 1, 1_000, len(sent)):
    began = time.monotonic()
    with socket.create_connection((sys.argv[1], int(sys.argv[2]))) as connection:
        print(time.monotonic() - began)
        began = time.monotonic()
        connection.sendall(sent[:n])
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(32, socket.MSG_WAITALL) == hashlib.sha256(sent[:n]).digest()
        print(time.monotonic() - began)
"""


@pytest.mark.exhaustive
def test_packets_take_the_delay_and_arrive(network: ModuleType):
    assert [network.seconds(each) for each in ("2s", "1ms", "0us")] == [2, 1e-3, 0]
    delay = 0.02
    with (
        network.Network(["chief", "worker0", "ps0"], delay) as hosts,
        _receiver(network, hosts, _ANSWER_DIGESTS) as address,
    ):
        asks = [
            subprocess.Popen(
                hosts.command(host, [sys.executable, "-c", _ASK_FOR_DIGESTS, *address]),
                stdout=subprocess.PIPE,
                text=True,
            )
            for host in ("worker0", "chief")
        ]
        for ask in asks:
            out = ask.communicate(timeout=60)[0]
            assert ask.returncode == 0
            round_trips = [float(line) for line in out.splitlines()]
            assert len(round_trips) == 8
            assert min(round_trips) >= 2 * delay


# Has a host of its own that runs on, and says its process.
_NETWORK = """
import subprocess, sys, time
sys.path.insert(0, sys.argv[1])
from netns import network
with network.Network(["worker0"], float(sys.argv[2]) or None) as hosts:
    print(subprocess.Popen(hosts.command("worker0", ["sleep", "1000"])).pid, flush=True)
    time.sleep(1000)
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("delay", [0, 0.001])
def test_what_a_killed_run_left_is_removed(network: ModuleType, delay: float):
    command = [sys.executable, "-c", _NETWORK, str(_BENCHMARKS), str(delay)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as run:
        left = int(run.stdout.readline())
        run.kill()
    assert "worker0" in _namespaces()
    with network.Network(["ps0"]):
        assert "ps0" in _namespaces()
        assert "worker0" not in _namespaces()
        deadline = time.monotonic() + 10
        while pathlib.Path(f"/proc/{left}").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not pathlib.Path(f"/proc/{left}").exists()


def _namespaces() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout


@pytest.mark.exhaustive
def test_bytes_by_kind_and_waits_over_links_with_a_delay(
    network: ModuleType, tmp_path: pathlib.Path
):
    path = tmp_path / "runs.json"
    flags = ("--rates=1gbit", "--delay=1ms", "--variants=no_cache,s100", "--dense_staleness=4")
    done = _run(*flags, "--servers=1", "--lookahead=2", "--epochs=3", f"--json={path}")
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert "1ms from host to host" in done.stdout
    assert "het-tf-bench" not in _namespaces()
    from netns import runs

    no_cache, cached = runs.figures(runs.read(path))
    for row in (no_cache, cached):
        assert set(row.kb) == {"embeddings", "dense", "rest"}
        assert 0 < row.kb["rest"] < 0.5 * row.kb["embeddings"] + 0.5 * row.kb["dense"]
        assert row.kb["dense"] > 0
        assert row.server_ms > 0
    assert (cached.waited_ms > 0) == (cached.waited > 0)
    assert cached.kb["embeddings"] < 0.8 * no_cache.kb["embeddings"]


@pytest.mark.exhaustive
def test_tf_keras_trains_what_het_tf_does(network: ModuleType, tmp_path: pathlib.Path):
    from netns import runs, tf_keras_environment

    try:
        tf_keras_environment.install()
    except RuntimeError as error:
        pytest.skip(str(error))
    path = tmp_path / "runs.json"
    # One worker takes the batches in order.
    done = _run(
        *(
            "--workers=1",
            "--servers=1",
            "--rates=none",
            "--variants=tf_keras,no_cache",
            f"--json={path}",
        ),
        *("--row_optimizer=adagrad", "--steps=40", "--held_out=4096"),
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    tf_keras, het_tf = runs.figures(runs.read(path))
    assert tf_keras.auc[-1] == pytest.approx(het_tf.auc[-1], abs=0.03)
    assert tf_keras.auc[-1] > 0.52
    assert list(tf_keras.kb) == ["dense", "embeddings + rest"]
    # It sends an id's row as often as a batch has the id.
    assert tf_keras.kb_received > het_tf.kb_received


@pytest.mark.exhaustive
def test_a_signal_leaves_nothing_behind(network: ModuleType):
    flags = ("--variants=no_cache", "--rates=none", "--delay=1ms")
    command = [sys.executable, _PROGRAM, *_SMALL, *flags]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 120
        while "het-tf-bench-ps1" not in _namespaces() and time.monotonic() < deadline:
            time.sleep(0.2)
        time.sleep(2)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM
    assert "het-tf-bench" not in _namespaces()
