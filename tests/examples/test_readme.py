"""README's example, pasted into a file, runs and learns."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

import pytest

import het_tf

README = pathlib.Path(__file__).parents[2] / "README.md"


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    (example,) = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)
    folder = tmp_path_factory.mktemp("readme")
    (folder / "example.py").write_text(example)
    package = str(pathlib.Path(het_tf.__file__).parents[1])
    env = {**os.environ, "PYTHONPATH": package, "TMPDIR": str(folder)}
    del env["TF_ENABLE_ONEDNN_OPTS"]  # TensorFlow's default, as users have it
    ended = subprocess.run(
        [sys.executable, "example.py"],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-5000:]
    return folder, ended


def _printed(name: str, output: str) -> float:
    return float(re.search(rf"^{name}: ([\d.]+)$", output, re.MULTILINE)[1])


@pytest.mark.exhaustive
def test_it_trains_and_exports(ran):
    folder, ended = ran
    assert _printed("AUC of new examples", ended.stdout) > 0.75  # chance: 0.5
    assert _printed("ids that were in a cache", ended.stdout) > 0.5
    assert (folder / "saved_model" / "saved_model.pb").exists()


@pytest.mark.exhaustive
def test_a_machine_without_a_gpu_is_no_error(ran):
    folder, ended = ran
    logs = list(folder.glob("het_tf_cluster_*/*.log"))
    assert len(logs) == 5  # 4 servers, and what they are forked from
    for text in (ended.stderr, *(log.read_text(errors="replace") for log in logs)):
        assert "cuInit" not in text
