"""TF_CONFIG: every malformed part is named."""

from __future__ import annotations

import json

import pytest
import tensorflow as tf

from het_tf import server
from het_tf.distribute import HetParameterServerStrategy, LocalCluster, open_cluster
from het_tf.distribute.cluster.tf_config import check_cluster, read_tf_config

CLUSTER = {"worker": ["a:1", "b:2"], "ps": ["c:3"], "chief": ["d:4"]}


def config(**parts):
    return json.dumps({"cluster": CLUSTER, "task": {"type": "worker", "index": 1}, **parts})


def test_reads_a_good_one():
    task = read_tf_config(config())
    assert task.cluster == CLUSTER
    assert (task.task_type, task.task_index, task.address) == ("worker", 1, "b:2")


def test_counts_the_tasks_of_its_type_on_its_host():
    cluster = {"worker": ["a:1", "b:2", "a:3"], "ps": ["a:4"]}
    counts = [
        read_tf_config(config(cluster=cluster, task={"type": kind, "index": i})).num_tasks_on_host
        for kind, i in (("worker", 0), ("worker", 1), ("worker", 2), ("ps", 0))
    ]
    assert counts == [2, 1, 2, 1]


def test_accepts_what_tensorflow_accepts():
    assert read_tf_config(config(task={"type": "ps", "index": "0"})).task_index == 0
    # Task numbers as keys: 10 comes after 9.
    by_number = {str(i): f"c:{i + 3}" for i in (10, *range(10))}
    read = read_tf_config(config(cluster={**CLUSTER, "ps": by_number}))
    assert read.cluster["ps"] == [f"c:{i + 3}" for i in range(11)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "TF_CONFIG is not set"),
        ("  ", "TF_CONFIG is not set"),
        ("{cluster:", "TF_CONFIG is not valid JSON"),
        ("[1]", "TF_CONFIG must be a JSON object"),
        ("{}", r'TF_CONFIG\["cluster"\] must map task types'),
        (config(cluster=["a:1"]), r'TF_CONFIG\["cluster"\] must map task types'),
        (config(cluster={"worker": ["a:1"]}), "has no ps task"),
        (config(cluster={"ps": ["a:1"]}), "has no worker task"),
        (config(cluster={**CLUSTER, "ps": []}), "has no ps task"),
        (config(cluster={**CLUSTER, "ps": "c:3"}), r'\["ps"\] must be a list of addresses'),
        (config(cluster={**CLUSTER, "ps": ["c"]}), r'\["ps"\]\[0\] must be "host:port", got "c"'),
        (config(cluster={**CLUSTER, "ps": ["c:x"]}), r'\["ps"\]\[0\] must be "host:port"'),
        (config(cluster={**CLUSTER, "ps": [3]}), r'\["ps"\]\[0\] must be "host:port", got 3'),
        (config(cluster={**CLUSTER, "boss": ["c:9"]}), r'\["boss"\]: unknown task type'),
        (config(cluster={**CLUSTER, "ps": ["a:1"]}), r"worker\[0\] and ps\[0\] have the same addr"),
        (config(cluster={**CLUSTER, "chief": ["d:4", "e:5"]}), r'\["chief"\] must name one task'),
        (config(task=None), r'TF_CONFIG\["task"\] must be an object'),
        (config(task={"index": 0}), r'\["task"\]\["type"\] is null'),
        (config(task={"type": "sp", "index": 0}), r'\["task"\]\["type"\] is "sp"'),
        (config(task={"type": "ps"}), r'\["task"\]\["index"\] is null'),
        (config(task={"type": "ps", "index": 1}), r'\["task"\]\["index"\] is 1, .* has 1 task'),
        (config(task={"type": "ps", "index": -1}), r'\["task"\]\["index"\] is -1'),
        (config(task={"type": "ps", "index": True}), r'\["task"\]\["index"\] is true'),
    ],
)
def test_names_the_malformed_part(text, message):
    with pytest.raises(ValueError, match=message) as error:
        read_tf_config(text)
    assert "TF_CONFIG" in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "het_tf.server: TF_CONFIG is not valid JSON"),
        (config(task={"type": "chief", "index": 0}), "only worker and ps tasks run a server"),
    ],
)
def test_server_says_what_is_wrong(monkeypatch, text, message):
    monkeypatch.setenv("TF_CONFIG", text)
    with pytest.raises(SystemExit, match=message):
        server.main([])


def test_strategy_checks_tf_config(monkeypatch):
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver
    monkeypatch.setenv("TF_CONFIG", config(cluster={"worker": ["a:1"], "chief": ["d:4"]}))
    with pytest.raises(ValueError, match=r'TF_CONFIG\["cluster"\] has no ps task'):
        HetParameterServerStrategy(resolver())
    monkeypatch.setenv("TF_CONFIG", config())
    with pytest.raises(ValueError, match='"worker", but the training program is the chief'):
        HetParameterServerStrategy(resolver())


def test_open_cluster_gives_the_cluster_of_tf_config(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", config(task={"type": "chief", "index": 0}))
    with open_cluster(num_workers=0) as cluster:  # LocalCluster would refuse this number.
        assert cluster.resolver.cluster_spec().as_dict() == CLUSTER


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (config(), '"worker", but the training program is the chief.* `python -m het_tf.server`'),
        ("{cluster:", "TF_CONFIG is not valid JSON"),
    ],
)
def test_open_cluster_checks_tf_config(monkeypatch, text, message):
    monkeypatch.setenv("TF_CONFIG", text)
    with pytest.raises(ValueError, match=message), open_cluster():
        pass


@pytest.mark.parametrize("text", [None, "", " "])
def test_open_cluster_starts_a_local_cluster_without_tf_config(monkeypatch, text):
    if text is None:
        monkeypatch.delenv("TF_CONFIG", raising=False)
    else:
        monkeypatch.setenv("TF_CONFIG", text)
    with (
        pytest.raises(ValueError, match=r"num_workers must be an integer from 1 to \d+, not 0"),
        open_cluster(0, 3),
    ):
        pass


def test_strategy_checks_any_cluster_spec():
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec({"ps": ["a:1"]}), rpc_layer="grpc"
    )
    with pytest.raises(ValueError, match="cluster spec has no worker task"):
        HetParameterServerStrategy(resolver)
    with pytest.raises(ValueError, match="cluster spec must map"):
        check_cluster({})


@pytest.mark.parametrize("name", ["num_workers", "num_ps"])
@pytest.mark.parametrize("value", [0, "2"])
def test_local_cluster_needs_both_kinds(name, value):
    with pytest.raises(
        ValueError, match=rf"{name} must be an integer from 1 to \d+, not {value!r}"
    ):
        LocalCluster(**{name: value})
