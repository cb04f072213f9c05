"""The program of docs/keras_rs.md, in a process of its own. tests/docs runs it with the others."""

import pathlib
import re

import program_runner
import pytest

PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs/keras_rs.md"

ASK = """
losses = model.history.history["loss"]
assert losses[-1] < losses[0], losses
assert {name: rows.shape for name, rows in tables.items()} == {
    "movies": (1000, 16), "users": (500, 16)
}
"""


@pytest.mark.exhaustive
def test_keras_rs_usage_with_one_import_changed(tmp_path):
    alone, *_ = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert alone.count("import het_tf as keras_rs  # was: import keras_rs") == 1
    program = tmp_path / "program.py"
    program.write_text(alone + ASK)
    done = program_runner.run(program)
    assert done.returncode == 0, done.stderr[-3000:]
