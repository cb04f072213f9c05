"""The manifests of examples/clusters: every pod gets its task, and the schemas allow them."""

from __future__ import annotations

import json
import os
import pathlib
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from het_tf.distribute.cluster.tf_config import TaskConfig, read_tf_config

FOLDER = pathlib.Path(__file__).parents[2] / "examples" / "clusters"
CRD = "HET_TF_TFJOB_CRD"
SERVER, PROGRAM = ["python", "-P", "-m", "het_tf.server"], ["python", "train.py"]


def objects(name: str) -> dict[tuple[str, str], dict[str, Any]]:
    """The objects of a manifest by kind and name."""
    documents = yaml.safe_load_all((FOLDER / name).read_text())
    return {(each["kind"], each["metadata"]["name"]): each for each in documents}


def container(pods: dict[str, Any]) -> dict[str, Any]:
    (only,) = pods["template"]["spec"]["containers"]
    return only


def admitted(policy: dict[str, Any]) -> dict[str, str]:
    """The labels of the pods that reach one another, and no others reach."""
    (source,) = policy["spec"]["ingress"][0]["from"]
    assert policy["spec"]["policyTypes"] == ["Ingress"]
    assert source["podSelector"] == policy["spec"]["podSelector"]
    return source["podSelector"]["matchLabels"]


def check_tasks(tasks: list[TaskConfig]) -> None:
    """All tasks of one cluster are there, once."""
    cluster = tasks[0].cluster
    expected = {(kind, index) for kind in cluster for index in range(len(cluster[kind]))}
    assert {(task.task_type, task.task_index) for task in tasks} == expected
    assert len(tasks) == len(expected)
    assert all(task.cluster == cluster for task in tasks)
    assert set(cluster) == {"ps", "worker", "chief"}


def test_pods_of_stateful_sets_get_their_tasks():
    found = objects("statefulsets.yaml")
    cluster = found["ConfigMap", "het-cluster"]["data"]["cluster"]
    service = found["Service", "het"]["spec"]
    assert service["clusterIP"] == "None"
    label = service["selector"]
    assert admitted(found["NetworkPolicy", "het-tasks-only"]) == label
    tasks = []
    for kind in ("ps", "worker", "chief"):
        name = f"het-{kind}"
        pods = found["Job" if kind == "chief" else "StatefulSet", name]["spec"]
        spec, labels = pods["template"]["spec"], pods["template"]["metadata"]["labels"]
        assert label.items() <= labels.items()
        if kind == "chief":
            assert (spec["hostname"], spec["subdomain"]) == (name, "het")
        else:
            assert pods["serviceName"] == "het"
            assert pods["selector"]["matchLabels"] == labels
        program = container(pods)
        assert program["command"] == (PROGRAM if kind == "chief" else SERVER)
        (text,) = [x["value"] for x in program["env"] if x["name"] == "TF_CONFIG"]
        for index in range(pods.get("replicas", 1)):
            config = text.replace("$(CLUSTER)", cluster).replace("$(INDEX)", str(index))
            task = read_tf_config(config)
            assert (task.task_type, task.task_index) == (kind, index)
            pod = name if kind == "chief" else f"{name}-{index}"
            assert task.address == f"{pod}.het:{program['ports'][0]['containerPort']}"
            tasks.append(task)
    check_tasks(tasks)


def tf_configs(job: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The type of every task of a TFJob, and the TF_CONFIG that Kubeflow's operator gives it."""
    name, replicas = job["metadata"]["name"], job["spec"]["tfReplicaSpecs"]
    cluster = {}
    for kind, pods in replicas.items():
        (port,) = [p["containerPort"] for p in container(pods)["ports"] if p["name"] == PORT]
        hosts = [f"{name}-{kind.lower()}-{index}" for index in range(pods["replicas"])]
        cluster[kind.lower()] = [f"{host}.default.svc:{port}" for host in hosts]
    for kind, addresses in cluster.items():
        for index in range(len(addresses)):
            task = {"type": kind, "index": index}
            yield kind, json.dumps({"cluster": cluster, "task": task, "environment": "cloud"})


PORT = "tfjob-port"


def test_pods_of_a_tfjob_get_their_tasks():
    found = objects("tfjob.yaml")
    job = found["TFJob", "clicks"]
    label = {"training.kubeflow.org/job-name": "clicks"}  # The operator labels every pod.
    assert admitted(found["NetworkPolicy", "clicks-tasks-only"]) == label
    assert job["spec"]["runPolicy"]["cleanPodPolicy"] == "Running"
    for kind, pods in job["spec"]["tfReplicaSpecs"].items():
        program = container(pods)
        assert program["name"] == "tensorflow"  # The operator sets TF_CONFIG in no other one.
        assert program["command"] == (PROGRAM if kind == "Chief" else SERVER)
        # Servers that are told to end, as by a node that shuts down, exit with 0.
        assert pods["restartPolicy"] == ("Never" if kind == "Chief" else "Always")
    tasks = []
    for kind, config in tf_configs(job):
        tasks.append(read_tf_config(config))
        assert tasks[-1].task_type == kind
    check_tasks(tasks)


# Schemas.


def errors(value: Any, schema: dict[str, Any], path: str) -> list[str]:
    """What a structural schema of Kubernetes says against a value. Unknown fields are errors."""
    if schema.get("x-kubernetes-int-or-string"):
        return [] if isinstance(value, int | str) else [f"{path}: {value!r}"]
    types = {"object": dict, "array": list, "string": str, "boolean": bool, "integer": int}
    if schema["type"] in types and not (
        isinstance(value, types[schema["type"]])
        and (schema["type"] == "boolean") == isinstance(value, bool)
    ):
        return [f"{path}: {value!r} is not of type {schema['type']}"]
    found = []
    if value not in schema.get("enum", [value]):
        found.append(f"{path}: {value!r} is not one of {schema['enum']}")
    if "pattern" in schema and not re.search(schema["pattern"], value):
        found.append(f"{path}: {value!r} does not match {schema['pattern']}")
    if isinstance(value, int) and not schema.get("minimum", value) <= value:
        found.append(f"{path}: {value!r} is less than {schema['minimum']}")
    if isinstance(value, list):
        for i, item in enumerate(value):
            found += errors(item, schema["items"], f"{path}[{i}]")
    if isinstance(value, dict):
        found += [f"{path}.{name} is missing" for name in {*schema.get("required", ())} - {*value}]
        for name, item in value.items():
            inner = schema.get("properties", {}).get(name) or schema.get("additionalProperties")
            if inner:
                found += errors(item, inner, f"{path}.{name}")
            elif not schema.get("x-kubernetes-preserve-unknown-fields"):
                found.append(f"{path}.{name} is unknown")
    return found


def test_tfjob_fits_the_schema_of_its_operator():
    if CRD not in os.environ:
        pytest.skip(
            f"{CRD} is not set: the path of manifests/base/crds/kubeflow.org_tfjobs.yaml, in the "
            "branch release-1.9 of kubeflow/training-operator"
        )
    crd = yaml.safe_load(pathlib.Path(os.environ[CRD]).read_text())
    job = objects("tfjob.yaml")["TFJob", "clicks"]
    assert job["apiVersion"].split("/")[0] == crd["spec"]["group"]
    (schema,) = [
        version["schema"]["openAPIV3Schema"]
        for version in crd["spec"]["versions"]
        if version["name"] == job["apiVersion"].split("/")[1]
    ]
    # The type of `metadata` is Kubernetes's own.
    schema["properties"]["metadata"]["x-kubernetes-preserve-unknown-fields"] = True
    assert errors(job, schema, "TFJob") == []
    # The checks find faults.
    job["spec"]["runPolicy"]["cleanPodPolicies"] = "All"
    job["spec"]["tfReplicaSpecs"]["PS"]["replicas"] = "2"
    del job["spec"]["tfReplicaSpecs"]["Chief"]["template"]["spec"]["containers"]
    assert len(errors(job, schema, "TFJob")) == 3
