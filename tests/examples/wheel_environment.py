"""A wheel of this checkout, and environments with nothing but the wheel and what it requires."""

from __future__ import annotations

import importlib.metadata
import os
import pathlib
import re
import subprocess
import sys
import venv
import zipfile

from packaging.requirements import Requirement

ROOT = pathlib.Path(__file__).parents[2]


def build(folder: pathlib.Path) -> pathlib.Path:
    """The wheel as `make wheel` builds it, but of the objects for this CPU, which are there."""
    pip = [sys.executable, "-m", "pip", "-q", "wheel", "--no-deps", "--no-build-isolation"]
    env = {name: value for name, value in os.environ.items() if name != "HET_TF_PORTABLE"}
    subprocess.run([*pip, "-w", folder, "."], cwd=ROOT, env=env, check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def create(folder: pathlib.Path, wheel: pathlib.Path) -> pathlib.Path:
    """Creates an environment that has what the wheel requires, but not the wheel; its Python."""
    venv.create(folder, symlinks=True)
    (site_packages,) = folder.glob("lib/python*/site-packages")
    # TensorFlow and the rest come from this environment, so that no package index is needed.
    seen = requirements(wheel)
    assert "tensorflow" in seen
    assert not {"het-tf", "pytest", "tensorflow-datasets"} & seen.keys()
    for distribution in seen.values():
        _link(distribution, site_packages)
    return folder / "bin" / "python"


def pip_of(python: pathlib.Path) -> list[str]:
    """The command that is pip of an environment, without an index."""
    return [sys.executable, "-m", "pip", "--python", str(python)]


def variables() -> dict[str, str]:
    """This process's variables, without those that lead pip or Python elsewhere.

    pip finds what the wheel requires where it installs, or fails: there is no index.
    """
    elsewhere = ("PIP_", "PYTHON")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(elsewhere)}
    return kept | {"PIP_NO_INDEX": "1"}


def requirements(wheel: pathlib.Path) -> dict[str, importlib.metadata.Distribution]:
    """All that the wheel requires, as it is installed here, by name."""
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        text = archive.read(metadata).decode()
    seen: dict[str, importlib.metadata.Distribution] = {}
    for line in re.findall(r"^Requires-Dist: (.*)$", text, re.MULTILINE):
        _add_required(line, seen)
    return seen


def _add_required(text: str, seen: dict[str, importlib.metadata.Distribution]) -> None:
    """Puts the installed distribution of a requirement into `seen`, and all that it requires."""
    requirement = Requirement(text)
    if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
        return
    key = re.sub(r"[-_.]+", "-", requirement.name).lower()
    if key in seen:
        return
    seen[key] = importlib.metadata.distribution(requirement.name)
    for inner in seen[key].requires or ():
        _add_required(inner, seen)


def _link(distribution: importlib.metadata.Distribution, site_packages: pathlib.Path) -> None:
    """The files of a distribution in another environment, as pip would lay them there."""
    for file in distribution.files or ():
        if ".." in file.parts or "__pycache__" in file.parts:  # programs; made when imported
            continue
        target = site_packages / file
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to(file.locate().resolve())
