"""The wheel, in an environment with nothing but what it requires."""

from __future__ import annotations

import importlib.metadata
import os
import pathlib
import re
import subprocess
import sys
import venv
import zipfile

import pytest
from packaging.requirements import Requirement

ROOT = pathlib.Path(__file__).parents[2]

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


def build(folder: pathlib.Path) -> pathlib.Path:
    """The wheel as `make wheel` builds it, but of the objects for this CPU, which are there."""
    pip = [sys.executable, "-m", "pip", "-q", "wheel", "--no-deps", "--no-build-isolation"]
    env = {name: value for name, value in os.environ.items() if name != "HET_TF_PORTABLE"}
    subprocess.run([*pip, "-w", folder, "."], cwd=ROOT, env=env, check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def required(name: str, seen: dict[str, importlib.metadata.Distribution]) -> None:
    """Puts the installed distribution of that name into `seen`, and all that it requires."""
    key = re.sub(r"[-_.]+", "-", name).lower()
    if key in seen:
        return
    seen[key] = importlib.metadata.distribution(name)
    for text in seen[key].requires or ():
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            required(requirement.name, seen)


def link(distribution: importlib.metadata.Distribution, site_packages: pathlib.Path) -> None:
    """The files of a distribution in another environment, as pip would lay them there."""
    for file in distribution.files or ():
        if ".." in file.parts or "__pycache__" in file.parts:  # programs; made when imported
            continue
        target = site_packages / file
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to(file.locate().resolve())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> pathlib.Path:
    return build(tmp_path_factory.mktemp("dist"))


def test_serves_every_python(wheel):
    assert re.fullmatch(r"het_tf-[\d.]+-py3-none-linux_x86_64\.whl", wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {"het_tf/_het_ops.so", "het_tf/_het_ops.json"} <= set(names)
    assert [n for n in names if not re.match(r"het_tf(-[\d.]+\.dist-info)?/", n)] == []


@pytest.mark.exhaustive
def test_trains_where_only_its_requirements_are(wheel, tmp_path):
    env = tmp_path / "env"
    venv.create(env, symlinks=True)
    (site_packages,) = env.glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        text = archive.read(metadata).decode()
    # TensorFlow and the rest come from this environment, so that no package index is needed.
    seen: dict[str, importlib.metadata.Distribution] = {}
    for line in re.findall(r"^Requires-Dist: (.*)$", text, re.MULTILINE):
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            required(requirement.name, seen)
    assert "tensorflow" in seen
    assert not {"het-tf", "pytest", "tensorflow-datasets"} & seen.keys()
    for distribution in seen.values():
        link(distribution, site_packages)

    # pip finds what the wheel requires where it installs, or fails: there is no index.
    pip = [sys.executable, "-m", "pip", "-q", "--python", env / "bin" / "python", "install"]
    subprocess.run([*pip, "--no-index", wheel], check=True, env=environment())
    ran = subprocess.run(
        [env / "bin" / "python", "-I", "-c", STEP],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    where, rows = ran.stdout.split()[-2:]
    assert where.startswith(str(env))
    assert rows == "4"


def environment() -> dict[str, str]:
    """This process's variables, without those that lead pip or Python elsewhere."""
    elsewhere = ("PIP_", "PYTHON")
    return {name: value for name, value in os.environ.items() if not name.startswith(elsewhere)}
