"""The peer's environment: tf_keras, pinned, beside the TensorFlow of this one."""

from __future__ import annotations

import pathlib
import subprocess
import sys

REQUIREMENT = "tf_keras==2.21.0"  # of the TensorFlow that het_tf needs
_FOLDER = pathlib.Path(__file__).resolve().parents[2] / "build" / REQUIREMENT.replace("==", "-")


def install() -> str:
    """Installs tf_keras into a folder of its own, unless it is there.

    Only programs that are given the folder find it, so that Keras 3 stays alone everywhere else.

    Returns:
      The folder, for PYTHONPATH.

    Raises:
      RuntimeError: pip could not install it; holds what it printed.
    """
    if not (_FOLDER / "tf_keras").exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        done = subprocess.run(
            # Without what it depends on: that is TensorFlow, which is here.
            [*pip, "--no-deps", "--target", str(_FOLDER), REQUIREMENT],
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise RuntimeError(f"could not install {REQUIREMENT}:\n{done.stderr[-2000:]}")
    return str(_FOLDER)
