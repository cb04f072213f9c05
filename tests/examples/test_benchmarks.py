"""The programs in benchmarks/ run, and what they count is right. Times are not looked at."""

from __future__ import annotations

import gzip
import json
import os
import pathlib
import re
import shutil
import socket
import subprocess
import sys

import numpy as np
import program_runner
import pytest

_BENCHMARKS = pathlib.Path(__file__).resolve().parents[2] / "benchmarks"

needs_ss = pytest.mark.skipif(shutil.which("ss") is None, reason="needs ss of iproute2")


def _run(program: str, *flags: str) -> subprocess.CompletedProcess[str]:
    return program_runner.run(_BENCHMARKS / program, *flags)


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


@pytest.mark.exhaustive
@needs_ss
def test_bytes_fall_with_staleness_and_the_kernel_agrees(tmp_path: pathlib.Path):
    done = _run(
        "cluster_bytes.py",
        "--ids=2048",
        "--rows=20000",
        "--dim=64",
        "--capacity=8000",
        "--steps=120",
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


@pytest.mark.exhaustive
def test_table_memory():
    done = _run("table_memory.py", "--rows=1000000", "--limit=1.6")
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    peak = re.search(r"peak resident.* ([0-9.]+)$", done.stdout, re.MULTILINE)
    assert peak
    assert 1.0 < float(peak[1]) <= 1.6


@pytest.mark.exhaustive
def test_expiry(tmp_path: pathlib.Path):
    out = tmp_path / "figures.json"
    done = _run("expiry.py", "--ids=300000", "--step=2000", f"--out={out}", "--background")
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    result = json.loads(out.read_text())["result"]
    assert result["rows_expired"] > 0
    # 150 steps of 20 ids that return, but for the last step's, which have not yet.
    assert result["rows_created"] == 149 * 20


@pytest.mark.exhaustive
def test_sweep():
    done = _run("sweep.py", "--rows=20000", "--seconds=0.1")
    assert done.returncode == 0, done.stderr[-2000:]
    figures = [json.loads(line) for line in done.stdout.splitlines()]
    # Those that a step updated since time moved are not dropped.
    assert [line.get("dropped", 0) > 0 for line in figures] == [False, False, True, False]


@pytest.mark.exhaustive
def test_checkpoint(tmp_path: pathlib.Path):
    out = tmp_path / "figures.json"
    done = _run("checkpoint.py", "--rows=50000", f"--folder={tmp_path}", f"--out={out}")
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(out.read_text())
    assert figures["rows"] == 50_000
    # Keys, clocks, values and a slot of each row, and little beside them.
    payload = 50_000 * (16 + 4 * 17) / 1e6
    assert payload < figures["file MB"] < 1.01 * payload
    assert sorted(tmp_path.iterdir()) == [out]


@pytest.mark.exhaustive
def test_local_step(tmp_path: pathlib.Path):
    path = tmp_path / "figures.json"
    flags = ("--programs=table,TensorFlow", "--rounds=1", "--threads=1", "--steps=3")
    size = ("--ids=512", "--rows=3000", "--dim=8", f"--json={path}")
    done = _run("local_step.py", *flags, *size)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    (figures,) = json.loads(path.read_text())
    assert figures["beside"] == "table"
    assert list(figures["rounds"]) == ["table", "TensorFlow"]
    for rounds in figures["rounds"].values():
        assert [set(each) for each in rounds] == [{"forward", "step", "loop"}]


def test_ratios_of_a_local_step_are_of_the_same_round(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(_BENCHMARKS)
    import local_step

    said = {"peer": [{"step": 1}, {"step": 9}, {"step": 2}]}
    said["ours"] = [{"step": 3}, {"step": 9}, {"step": 4}]
    # The ratio of the medians would be 4 / 2 in either order of the rounds.
    assert local_step.summary(said, "peer") == {"peer": {"step": (2, 1)}, "ours": {"step": (4, 2)}}
    said["ours"].reverse()
    assert local_step.summary(said, "peer")["ours"] == {"step": (4, 1.5)}


@pytest.mark.exhaustive
def test_pooled_step(tmp_path: pathlib.Path):
    path = tmp_path / "figures.json"
    size = ("--bags=20", "--longest=4", "--rows=300", "--dim=8", "--steps=3", f"--json={path}")
    done = _run("pooled_step.py", *size)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    figures = json.loads(path.read_text())
    assert len({each["case"] for each in figures}) == 6
    for each in figures:
        assert set(each["ms"]) == {"het_tf", "TensorFlow", "unique"}


@pytest.mark.exhaustive
@pytest.mark.parametrize("run", ["steps", "fit"])
def test_feature_step(tmp_path: pathlib.Path, run: str):
    path = tmp_path / "figures.json"
    path.write_text('{"cluster": {}}')
    size = ("--features=3", "--batch=8", "--rows=50", "--dim=4", "--steps=10", f"--json={path}")
    done = _run("feature_step.py", f"--run={run}", *size)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    runs = json.loads(path.read_text())
    assert set(runs) == {"cluster", run}  # The file keeps the runs that it has.
    figures = runs[run]
    others = ("concatenated", "stacked", "joined")
    assert set(figures["ms"]) == {*others, "collection", "apart"}
    assert set(figures["ratios"]) == {f"{w} / {o}" for w in ("collection", "apart") for o in others}


def test_factorization_machine(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(_BENCHMARKS)
    import factorization_machine as fm

    rng = np.random.default_rng(1)
    rows = rng.normal(size=(3, 4, 5)).astype(np.float32)
    labels = np.array([0, 1, 1], np.float32)
    rows[1, 2:] = 0  # an example of two fields

    def loss(rows: np.ndarray) -> float:
        return float(np.mean(np.logaddexp(0, np.where(labels, -1, 1) * fm.logits(rows))))

    weights, factors = rows[0, :, 0], rows[0, :, 1:]
    pairs = sum(factors[i] @ factors[j] for i in range(4) for j in range(i))
    np.testing.assert_allclose(fm.logits(rows)[0], weights.sum() + pairs, rtol=1e-5)
    gradients = fm.gradients(rows, labels)
    for place in [(0, 1, 0), (1, 1, 2), (2, 3, 4)]:
        moved = rows.astype(np.float64)
        moved[place] += 1e-5
        slope = (loss(moved) - loss(rows.astype(np.float64))) / 1e-5
        assert gradients[place] == pytest.approx(slope, rel=1e-3)

    scores, labels = rng.integers(0, 9, 200), rng.integers(0, 2, 200)
    difference = np.subtract.outer(scores[labels == 1], scores[labels == 0])
    expected = np.mean(np.where(difference == 0, 0.5, difference > 0))
    assert fm.area_under_curve(scores, labels) == pytest.approx(expected)


def test_embedding_network(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(_BENCHMARKS)
    from embedding_network import EmbeddingNetwork

    network = EmbeddingNetwork(fields=5, added=slice(1, 3), dim=3)
    weights = network.initial_weights(seed=1).astype(np.float64)
    rng = np.random.default_rng(1)
    weights += rng.normal(size=weights.shape) * 0.1
    rows = rng.normal(size=(6, 5, 3))
    labels = np.array([0, 1, 1, 0, 1, 0], np.float64)
    moved = rows.copy()
    moved[:, 1:3] = rows[:, 2:0:-1]
    np.testing.assert_allclose(network.logits(moved, weights), network.logits(rows, weights))

    def loss(rows: np.ndarray, weights: np.ndarray) -> float:
        signs = np.where(labels, -1, 1)
        return float(np.mean(np.logaddexp(0, signs * network.logits(rows, weights))))

    of_rows, of_weights = network.gradients(rows, labels, weights)
    move = rng.normal(size=rows.shape) * 1e-6
    slope = (loss(rows + move, weights) - loss(rows - move, weights)) / 2
    assert np.sum(of_rows * move) == pytest.approx(slope, rel=1e-4)
    move = rng.normal(size=weights.shape) * 1e-6
    slope = (loss(rows, weights + move) - loss(rows, weights - move)) / 2
    assert np.sum(of_weights * move) == pytest.approx(slope, rel=1e-4)


@pytest.mark.parametrize("name", ["adam", "adagrad", "sgd"])
def test_optimizers_of_dense_workers(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(_BENCHMARKS)
    import dense_workers
    import keras

    initial = np.linspace(-1, 1, 5, dtype=np.float32)
    optimizer = dense_workers.OPTIMIZERS[name](0.1)
    peers = {"adam": keras.optimizers.Adam, "adagrad": keras.optimizers.Adagrad}
    peer = peers.get(name, keras.optimizers.SGD)(0.1)
    expected = keras.Variable(initial)
    ours = [dense_workers.OneForAll(initial, optimizer)]
    ours += [dense_workers.Replicas(1, k, initial, optimizer) for k in (0, 1, 7)]
    for step in range(10):
        gradient = np.sin(np.arange(5, dtype=np.float32) + step)
        for each in ours:
            np.testing.assert_allclose(each.weights(0), expected, rtol=1e-5, atol=1e-6)
            each.update(0, gradient)
        peer.apply([gradient], [expected])
    for each in ours:
        each.flush()
        np.testing.assert_allclose(each.shared_weights(), expected, rtol=1e-5, atol=1e-6)
        each.close()


@pytest.mark.parametrize("staleness", [0, 1, 4, 64])
def test_every_step_of_dense_workers_counts_once(staleness: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(_BENCHMARKS)
    import dense_workers

    workers, steps = 3, 60
    zeros = np.zeros(4, np.float32)
    dense = dense_workers.Replicas(workers, staleness, zeros, dense_workers.Sgd(1.0))
    for step in range(workers * steps):
        dense.weights(step % workers)
        # A step is settled when the next begins.
        missed = step - dense.steps_known(step % workers)
        assert missed <= staleness + (workers - 1) * (staleness + 1)
        dense.update(step % workers, zeros - 1)
    dense.flush()
    total = dense.shared_weights() + dense.owed()
    np.testing.assert_allclose(total, zeros + workers * steps, rtol=1e-5)
    stats = dense.stats()
    assert stats["steps"] == stats["steps_sent"] == workers * steps
    # After n own steps every n / 15 steps, and at most every k / 2.
    most = steps if staleness < 4 else 30 + (steps - 30) // 2 + 1
    assert stats["pushes"] <= workers * most
    dense.close()


def test_model_of_the_lfu_of_before(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(_BENCHMARKS)
    import lfu_model

    steps = [np.array(keys) for keys in ([0, 1], [0, 2], [0, 1], [2, 3], [0, 1])]
    assert lfu_model.hit_rate(steps, 4, capacity=4) == 6 / 10
    # Key 1 leaves for 2 (the lower slot of equal scores may go either way), 0 stays.
    assert lfu_model.hit_rate(steps[:3], 4, capacity=2) == 2 / 6
    never = [np.array([step]) for step in range(9)]
    assert lfu_model.hit_rate(never, 9, capacity=3) == 0


_AUC = ("--workers=2", "--seeds=1", "--epochs=1,1", "--batch=64,64", "--examples=6400")


@pytest.mark.exhaustive
def test_bytes_fall_with_the_bound_and_runs_are_not_repeated(tmp_path: pathlib.Path):
    path = tmp_path / "runs.json"
    flags = (*_AUC, "--datasets=100k", "--clocks=count,drift", f"--json={path}")
    done = _run("staleness_auc.py", *flags, "--count_bounds=4,64", "--drift_bounds=1")
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    runs = json.loads(path.read_text())
    assert [run["setting"]["clock"] for run in runs] == ["none", "count", "count", "drift"]
    totals = [run["bytes_up"] + run["bytes_down"] for run in runs]
    assert totals[0] > totals[1] > totals[2]
    assert totals[0] > totals[3]
    assert all(0.5 < run["auc"] < 1 for run in runs)
    assert "fewest bytes within one sd of no cache" in done.stdout

    plot = tmp_path / "curves.png"
    done = _run(
        "staleness_auc.py", *flags, "--count_bounds=64,9", "--drift_bounds=1", f"--plot={plot}"
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    again = json.loads(path.read_text())
    assert again[:4] == runs
    assert [run["setting"]["bound"] for run in again[4:]] == [9]
    assert plot.stat().st_size > 0


@pytest.mark.exhaustive
def test_dense_bytes_fall_with_the_staleness(tmp_path: pathlib.Path):
    path = tmp_path / "runs.json"
    flags = ("--workers=2", "--seeds=1", "--epochs=1", "--examples=64000", f"--json={path}")
    flags = (*flags, "--optimizers=adam", "--learning_rates=.01")
    done = _run("dense_staleness_auc.py", *flags, "--staleness=0,16")
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    runs = json.loads(path.read_text())
    assert [(run["setting"]["cache"], run["setting"]["staleness"]) for run in runs] == [
        *(("none", k) for k in (None, 0, 16)),
        *(("default", k) for k in (None, 0, 16)),
    ]
    none, zero, sixteen, *cached = runs
    # Beside the weights one way and gradients the other, headers.
    assert none["dense_bytes"] <= zero["dense_bytes"] <= 1.1 * none["dense_bytes"]
    assert sixteen["dense_bytes"] < 0.3 * none["dense_bytes"]
    assert all(run["row_bytes"] < none["row_bytes"] for run in cached)
    assert all(0.5 < run["auc"] < 1 for run in runs)
    assert "| cache | workers | bytes of rows | None | 0 | 16 |" in done.stdout


@pytest.mark.exhaustive
def test_implicit_data_set(tmp_path: pathlib.Path):
    rng = np.random.default_rng(1)
    for part, size in (("train", 700), ("test", 50)):
        ids = rng.integers(0, [30, 2, 7, 21, 40, 18], (size, 6))
        lines = ("{}-{}-{}-{},{}-{}\n".format(*row) for row in ids)
        with gzip.open(tmp_path / f"{part}.csv.gz", "wt") as file:
            file.writelines(lines)
    done = _run(
        "staleness_auc.py",
        *_AUC,
        "--datasets=1m",
        f"--movielens_1m={tmp_path}",
        "--clocks=lamport",
        "--lamport_bounds=9",
        "--split=each",
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert re.search(r"^lamport +9 ", done.stdout, re.MULTILINE)


@pytest.mark.exhaustive
def test_a_cache_never_costs_more_than_none(tmp_path: pathlib.Path):
    path = tmp_path / "figures.json"
    done = _run("cache_traces.py", "--quick", "--jobs=1", "--staleness=0,10", f"--json={path}")
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    figures = json.loads(path.read_text())
    traces = ["zipf_0", "zipf_0.8", "zipf_1.05", "zipf_1.3", "once", "once_known", "half_once"]
    assert list(dict.fromkeys(each["case"]["trace"] for each in figures)) == traces
    assert all(each["up"] <= 1.02 and each["down"] <= 1.02 for each in figures)
    (skewed,) = [
        each
        for each in figures
        if each["case"]["trace"] == "zipf_1.3"
        and each["case"]["percent"] == 10
        and each["case"]["staleness"] == "10"
    ]
    assert skewed["up"] + skewed["down"] < 1.2
    assert skewed["hits"] > 0.6


@pytest.mark.exhaustive
def test_cache_memory(tmp_path: pathlib.Path):
    path = tmp_path / "figures.json"
    done = _run(
        "cache_memory.py",
        "--memory_rows=200000",
        "--fill=8192",
        "--cached=50000",
        "--timed_steps=40",
        "--ids=512",
        f"--json={path}",
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    figures = json.loads(path.read_text())
    assert figures["payload"] < figures["clean"] < 2 * figures["payload"]
    assert figures["clean"] < figures["dirty"] < 4 * figures["payload"]
    assert figures["evictions"] > 200
    assert figures["median_ms"] <= figures["longest_ms"]


@pytest.mark.exhaustive
def test_served_rows_are_timed_beside_tf_gather():
    flags = ["--rows=3000", "--dim=8", "--threads", "1", "--runs=3", "--every=0.2"]
    done = _run("serving.py", *flags)
    assert done.returncode == 0, done.stderr[-2000:]
    figures = json.loads(done.stdout)
    assert len(figures["seconds_until_served"]) == 5
    assert figures["1 threads"]["mapped_us"] > 0
    assert figures["1 threads"]["changed_to_gather"] > 0


@pytest.mark.exhaustive
def test_a_pipeline_of_steps_on_a_device_loses_no_update(tmp_path: pathlib.Path):
    path = tmp_path / "figures.json"
    small = ("--ids=300", "--rows=500", "--lines=128", "--steps=12")
    # It compares the table with the ids of all steps.
    done = _run("gpu_pipeline.py", *small, "--case=0,2,0", "--case=1,1,1", f"--json={path}")
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    figures = json.loads(path.read_text())
    assert [each["case"] for each in figures] == ["0,2,0", "1,1,1"]
    assert all(each["ratio"] > 0 for each in figures)


def _gpu(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(_BENCHMARKS.parent / "tools/gpu.py"), *arguments],
        capture_output=True,
        text=True,
        timeout=1500,
        env=os.environ | env,
    )


@pytest.mark.exhaustive
def test_the_benchmark_of_a_gpu_runs_with_the_host_in_its_place():
    done = _gpu("bench", "--host", "--ids=1000", "--rows", "3000", "--dims", "5", "--batches=2")
    for verb in ("unique", "find", "gather", "segment_sum", "update", "unpin", "step", "pool"):
        assert re.search(rf"^  {verb} +\d+\.\d+ ms", done.stdout, re.MULTILINE), done.stdout
    met = re.search(r"^(\d) of 2 targets met$", done.stdout, re.MULTILINE)
    assert met, done.stdout + done.stderr[-2000:]
    assert done.returncode == (0 if met[1] == "2" else 1)


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ({"gather": 80 / 0.7 - 0.01, "step": 1}, [True, True, True, False]),
        ({"gather": 80 / 0.7 + 0.01, "step": 400 / 0.5 + 0.01}, [False, False, False, False]),
        ({"gather": 1, "step": 400 / 0.5 - 0.01}, [True, True, False, False]),
    ],
)
def test_targets_of_a_gpu_are_met_or_missed(
    times: dict[str, float], expected: list[bool], monkeypatch: pytest.MonkeyPatch, capsys
):
    monkeypatch.syspath_prepend(_BENCHMARKS)
    import gpu_step

    # 10 ids of 7 keys, dim 1: gather moves 80 bytes, a step 400; a copy moves 1 in a millisecond.
    figures = dict.fromkeys(("unique", "find", "segment_sum", "update", "unpin", "pool"), 1.0)
    figures |= {"pooled_sum": 1.0, "keys": 7, "bags": 1, "copied_gb_s": 1e-6} | times
    figures["torch"] = {"index_select": 2.0, "embedding_bag": 1.9}
    assert gpu_step.report(10, 100, 1, figures) == expected
    said = capsys.readouterr().out
    assert said.count(": met") == sum(expected)
    assert said.count(": missed") == len(expected) - sum(expected)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"gather": 1.0, "step": 1.0}, "2 of 2 targets met"),
        ({"gather": 1.0, "step": 1e9}, "1 of 2 targets met"),
        (None, "0 of 0 targets met"),
    ],
)
def test_a_missed_target_or_no_case_fails_the_benchmark_of_a_gpu(
    said: dict[str, float] | None, expected: str, tmp_path: pathlib.Path
):
    figures = dict.fromkeys(("unique", "find", "segment_sum", "update", "unpin", "pool"), 1.0)
    figures |= {"pooled_sum": 1.0, "keys": 7, "bags": 1, "copied_gb_s": 1e-9}
    program = tmp_path / "step_bench"
    answer = f"echo '{json.dumps(figures | said)}'" if said else "echo 'out of memory' >&2; exit 1"
    program.write_text(f"#!/bin/sh\n{answer}\n")
    program.chmod(0o755)
    command = [sys.executable, str(_BENCHMARKS / "gpu_step.py"), str(program)]
    command += ["--ids=10", "--rows", "100", "--dims", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.stdout.splitlines()[-1] == expected, done.stdout + done.stderr[-2000:]
    assert done.returncode == (0 if expected == "2 of 2 targets met" else 1)


def test_all_tools_run_on_a_gpu_and_those_that_failed_are_named(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capfd
):
    monkeypatch.syspath_prepend(_BENCHMARKS.parent / "tools")
    import gpu

    programs_there = {
        "nvcc": "",
        "nvidia-smi": "",
        # compute-sanitizer --tool initcheck --error-exitcode 1 cuda_test ...
        "compute-sanitizer": 'echo "ran $*"; test "$2" != initcheck',
        "cuda_test": 'echo "ran $*"',
    }
    for name, does in programs_there.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(gpu, "build_tests", lambda: tmp_path / "cuda_test")
    with pytest.raises(SystemExit, match=r"failed, of none, .*synccheck: initcheck$"):
        gpu.test(["--gtest_filter=Lanes*"])
    ran = [line for line in capfd.readouterr().out.splitlines() if line.startswith("ran")]
    assert len(ran) == 1 + len(gpu.SANITIZER_TOOLS)
    assert ran[0] == "ran --gtest_filter=Lanes*"
    for line in ran[1:]:
        assert line.endswith(f"cuda_test {gpu.SANITIZED_TESTS} --gtest_filter=Lanes*")
    gpu.test(["--tool=none", "--tool=memcheck"])


def test_tests_on_a_gpu_are_not_passed_without_the_sanitizer(tmp_path: pathlib.Path):
    nvcc = tmp_path / "nvcc"
    nvcc.write_text("#!/bin/sh\n")
    nvcc.chmod(0o755)
    done = _gpu("test", PATH=str(tmp_path))
    assert done.returncode != 0
    assert "no compute-sanitizer here" in done.stderr
    assert "--tool=none" in done.stderr
    assert "--tool=memchek must be none or" in _gpu("test", "--tool=memchek").stderr
