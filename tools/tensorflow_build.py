"""Where the installed TensorFlow is and how to compile against it; as a program, in JSON."""

import importlib.metadata
import importlib.util
import json
import os
import sys
from pathlib import Path

TENSORFLOW = "2.21"
# Importing TensorFlow for its flags takes longer than compiling a source, so they are kept.
KEPT = Path(__file__).resolve().parent.parent / "build/tensorflow.json"


def tensorflow_build() -> dict:
    spec = importlib.util.find_spec("tensorflow")
    if spec is None:
        raise SystemExit(f"building het_tf needs tensorflow=={TENSORFLOW}.* in {sys.executable}")
    version = importlib.metadata.version("tensorflow")
    if not version.startswith(TENSORFLOW + "."):
        raise SystemExit(
            f"het_tf is for TensorFlow {TENSORFLOW}.*, but {sys.executable} has {version}"
        )
    if KEPT.exists() and KEPT.stat().st_mtime > Path(__file__).stat().st_mtime:
        build = json.loads(KEPT.read_text())
        if (build["origin"], build["version"]) == (spec.origin, version):
            return build
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    from tensorflow import sysconfig

    build = {
        "origin": spec.origin,
        "version": version,
        "include": sysconfig.get_include(),
        "library": sysconfig.get_lib(),
        "compile_flags": [f for f in sysconfig.get_compile_flags() if not f.startswith("-I")],
        "link_flags": sysconfig.get_link_flags(),
    }
    KEPT.parent.mkdir(exist_ok=True)
    KEPT.write_text(json.dumps(build))
    return build


if __name__ == "__main__":
    print(json.dumps(tensorflow_build()))
