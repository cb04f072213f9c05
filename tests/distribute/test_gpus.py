"""One GPU of its host for each worker. No GPU is needed: what the server is told is looked at."""

from __future__ import annotations

import pytest
import tensorflow as tf

from het_tf.distribute.cluster.tf_config import (
    TaskConfig,
    gpu_of,
    leave_memory_to_workers,
    show_one,
)

CLUSTER = {"worker": ["a:1", "b:1", "a:2", "a:3", "b:2", "c:1"], "ps": ["a:9"]}


def worker(index: int) -> TaskConfig:
    return TaskConfig(CLUSTER, "worker", index)


@pytest.fixture
def host_with(monkeypatch):
    """A function: this host has so many GPUs."""

    def host_with(count: int) -> None:
        devices = [
            tf.config.PhysicalDevice(f"/physical_device:GPU:{i}", "GPU") for i in range(count)
        ]
        monkeypatch.setattr(
            tf.config, "list_physical_devices", lambda kind: devices if kind == "GPU" else []
        )

    return host_with


def test_the_workers_of_a_host_take_its_gpus_in_turn():
    assert [worker(i).rank_on_host for i in range(6)] == [0, 0, 1, 2, 1, 0]
    assert [gpu_of(worker(i), 4) for i in range(6)] == [0, 0, 1, 2, 1, 0]
    assert [gpu_of(worker(i), 2) for i in range(6)] == [0, 0, 1, 0, 1, 0]
    # CUDA_VISIBLE_DEVICES shows a process the one that it is to have.
    assert [gpu_of(worker(i), 1) for i in range(6)] == [0] * 6
    assert gpu_of(worker(0), 0) is None


@pytest.mark.parametrize(
    ("index", "count", "visible", "said"),
    [
        (0, 0, "", ""),
        (3, 3, "2", "GPU 2 of 3"),
        (2, 2, "1", "GPU 1 of 2"),
        (4, 8, "1", "GPU 1 of 8; no worker uses 6 of them: list as many workers of this host"),
    ],
)
def test_a_server_sees_one(host_with, index, count, visible, said):
    host_with(count)
    config = tf.compat.v1.ConfigProto()
    assert show_one(worker(index), config) == said
    assert config.gpu_options.visible_device_list == visible
    assert config.gpu_options.allow_growth == bool(count)


def test_a_program_leaves_memory_to_its_workers(host_with, monkeypatch):
    host_with(2)
    grows = {}
    monkeypatch.setattr(tf.config.experimental, "set_memory_growth", grows.__setitem__)
    leave_memory_to_workers()
    assert {device.name: grow for device, grow in grows.items()} == {
        "/physical_device:GPU:0": True,
        "/physical_device:GPU:1": True,
    }


def test_a_program_that_uses_its_gpus_goes_on_as_it_is(host_with):
    # TensorFlow knows none of these; of one in use it raises a RuntimeError in the same place.
    host_with(1)
    with pytest.raises((ValueError, RuntimeError)):
        tf.config.experimental.set_memory_growth(tf.config.list_physical_devices("GPU")[0], True)
    leave_memory_to_workers()
