"""The Dockerfile of examples/clusters: its commands run as processes, without an engine."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import re
import shlex
import shutil
import subprocess

import pytest
import wheel_environment
from packaging.specifiers import SpecifierSet
from standalone import free_address

ROOT = wheel_environment.ROOT
DOCKERFILE = ROOT / "examples" / "clusters" / "Dockerfile"
DEFAULT = re.compile(r"(\w+)=(.*)")


def instructions() -> list[tuple[str, str]]:
    """The instructions of the Dockerfile with their arguments, in one line each."""
    text = re.sub(r"^#.*\n", "", DOCKERFILE.read_text(), flags=re.MULTILINE)
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    return [(words[0], words[1]) for line in lines if (words := line.split(maxsplit=1))]


def only(name: str) -> str:
    """The argument of the one instruction of that name."""
    (argument,) = [argument for instruction, argument in instructions() if instruction == name]
    return argument


def commands_of_run() -> list[list[str]]:
    """The words of every command of the RUN instruction, without its mounts."""
    commands = re.sub(r"--mount=\S+ +", "", only("RUN")).split("&&")
    return [shlex.split(command) for command in commands]


def copied() -> str:
    """The folder that COPY copies if no build argument says otherwise."""
    name, default = DEFAULT.fullmatch(only("ARG")).groups()
    assert only("COPY") == f"--chown=1000 ${{{name}}} ."
    return default


def test_paths_of_the_image_are_there_and_not_ignored():
    ignored = DOCKERFILE.with_name("Dockerfile.dockerignore").read_text().split()
    assert ignored == ["*", "!dist/*.whl", "!examples"]
    assert copied().startswith("examples/")
    assert (ROOT / copied() / "train.py").exists()
    assert "--mount=type=bind,source=dist,target=/dist " in only("RUN")  # where make wheel writes
    image = re.fullmatch(r"python:(3\.\d+)-slim", only("FROM"))
    assert image[1] in SpecifierSet(importlib.metadata.metadata("het_tf")["Requires-Python"])


@pytest.mark.exhaustive
def test_a_program_trains_with_the_commands_of_the_image(tmp_path):
    dist, program = tmp_path / "dist", tmp_path / "program"
    dist.mkdir()
    python = wheel_environment.create(tmp_path / "env", wheel_environment.build(dist))
    env = wheel_environment.variables()
    env["PATH"] = f"{python.parent}:{env['PATH']}"

    pip, user = commands_of_run()
    assert user[0] == "useradd"  # Not here.
    assert pip[0] == "pip"
    arguments = shlex.join(pip[1:]).replace("'/dist/*.whl'", f"{dist}/*.whl")
    command = f"{shlex.join(wheel_environment.pip_of(python))} {arguments}"
    subprocess.run(command, shell=True, env=env, check=True)
    shutil.copytree(ROOT / copied(), program)

    with contextlib.ExitStack() as stack:
        addresses = {kind: [free_address(stack)] for kind in ("ps", "worker", "chief")}

        def start(kind: str, *command: str) -> subprocess.Popen:
            task = {"cluster": addresses, "task": {"type": kind, "index": 0}}
            config = {"TF_CONFIG": json.dumps(task), "TF_GRPC_REUSE_PORT": "1"}
            started = subprocess.Popen(
                command, cwd=program, env=env | config, stdout=subprocess.PIPE, text=True
            )
            stack.callback(started.wait)
            stack.callback(started.kill)
            return started

        servers = [start(kind, *json.loads(only("CMD"))) for kind in ("ps", "worker")]
        # A LocalCluster would need workers.
        arguments = ["--workers=0", "--ps=0", "--groups=1", "--dim=64"]
        chief = start("chief", "python", "train.py", *arguments)
        said, _ = chief.communicate()
        assert chief.returncode == 0
        assert "MRR" in said
        for server, kind in zip(servers, ("ps", "worker"), strict=True):
            server.terminate()  # As the engine ends a container.
            said, _ = server.communicate()
            assert server.returncode == 0
            assert f"{kind} 0 serves {addresses[kind][0]}" in said
