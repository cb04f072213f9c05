"""The wheel, in an environment with nothing but what it requires."""

from __future__ import annotations

import pathlib
import re
import shutil
import subprocess
import zipfile

import pytest
import wheel_environment

ROOT = wheel_environment.ROOT

# One step on a table of this process, then what it did.
STEP = """
import het_tf, keras, numpy as np
ids = keras.Input((2,), dtype="int64")
embedding = het_tf.layers.HetEmbedding(4)
out = keras.layers.Dense(1)(keras.layers.Flatten()(embedding(ids)))
model = het_tf.keras.Model(ids, out)
model.compile("adam", "mse")
model.fit(np.array([[1, 2], [3, 4]]), np.ones((2, 1)), batch_size=2, verbose=0)
print(het_tf.__file__, embedding.table.size())
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> pathlib.Path:
    return wheel_environment.build(tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory) -> pathlib.Path:
    """The Python of an environment in which the wheel is installed."""
    python = wheel_environment.create(tmp_path_factory.mktemp("env"), wheel)
    pip = wheel_environment.pip_of(python)
    env = wheel_environment.variables()
    subprocess.run([*pip, "-q", "install", wheel], check=True, env=env)
    return python


def test_serves_every_python(wheel):
    assert re.fullmatch(r"het_tf-[\d.]+-py3-none-linux_x86_64\.whl", wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {"het_tf/_het_ops.so", "het_tf/_het_ops.json"} <= set(names)
    assert [n for n in names if not re.match(r"het_tf(-[\d.]+\.dist-info)?/", n)] == []


@pytest.mark.exhaustive
def test_trains_where_only_its_requirements_are(python, tmp_path):
    where, rows = ran([python, "-I", "-c", STEP], tmp_path).split()[-2:]
    assert where.startswith(str(python.parents[1]))
    assert rows == "4"


@pytest.mark.exhaustive
def test_an_example_runs_where_only_its_requirements_are(python, tmp_path):
    shutil.copytree(ROOT / "examples" / "kge", tmp_path / "kge")
    command = [python, "-s", "kge/train.py", "--workers=1", "--ps=1", "--groups=1", "--dim=64"]
    assert "MRR" in ran(command, tmp_path)


def ran(command: list[str | pathlib.Path], folder: pathlib.Path) -> str:
    """What a program that ends well writes."""
    ended = subprocess.run(
        command,
        cwd=folder,
        env=wheel_environment.variables(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended.stdout
