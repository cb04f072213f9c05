"""Builds het_tf/_het_ops.so against the installed TensorFlow; the metadata is in pyproject.toml.

Environment: CXX, MAX_JOBS (compilers at a time), HET_TF_PORTABLE=1 (run on other CPUs too),
HET_TF_CUDA (1: rows in GPUs' memory, with nvcc; 0: none; unset: where nvcc and a GPU are),
HET_TF_SANITIZE=1 (ops/core under sanitizers: `make fuzz-sanitized`).
"""

import json
import os
import shutil
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

sys.path.insert(0, str(Path(__file__).resolve().parent / "tools"))
import cxx
from tensorflow_build import tensorflow_build

# Not the files that include TensorFlow: under a sanitizer, absl lays its containers out otherwise.
VARIANT = "asan" if os.environ.get("HET_TF_SANITIZE") == "1" else "release"


def build_ops() -> tuple[Path, Path]:
    """Builds the op library, and beside it a note of what for that is readable without loading."""
    nvcc = cxx.nvcc_to_build_with()
    src = cxx.SOURCES
    link_flags = [*src.LINK_FLAGS, *cxx.VARIANTS[VARIANT]]
    if nvcc is not None:
        # Before TensorFlow's libraries.
        link_flags += [cxx.cudart(nvcc), *src.CUDA_LINK_FLAGS]
    objects = cxx.core_objects(VARIANT, nvcc)
    directory = cxx.variant_directory("release")
    with cxx.lock(directory):
        tf = tensorflow_build()
        # -isystem: with -I the TensorFlow headers print thousands of warnings.
        flags = [*cxx.variant_flags("release"), *tf["compile_flags"], "-isystem", tf["include"]]
        flags += [f'-DHET_TF_BUILT_FOR="{tf["version"]}"']
        flags += cxx.precompiled("tensorflow", src.TENSORFLOW_HEADERS, flags, directory)
        for_gpus = [] if nvcc is None else src.GPU_OP_SOURCES
        others = [source for source in src.OP_SOURCES if source not in for_gpus]
        objects += cxx.compile_objects(others, flags, directory)
        # What is not for CUDA has the same objects with it.
        objects += cxx.compile_objects(for_gpus, [*flags, "-DHET_TF_CUDA"], directory / "cuda")
        target = cxx.variant_directory(VARIANT) / ("host" if nvcc is None else "cuda")
        target.mkdir(exist_ok=True)
        library = target / "_het_ops.so"
        cxx.link(objects, [*link_flags, *tf["link_flags"]], library)
        note = target / "_het_ops.json"
        facts = {
            "tensorflow": tf["version"],
            "compiler": cxx.version(),
            "portable": cxx.PORTABLE,
            "cuda": None if nvcc is None else cxx.cuda_version(nvcc),
        }
        note.write_text(json.dumps(facts))
    return library, note


def put(built: Path, target: Path) -> None:
    """Copies by a rename: a process that has the old library mapped keeps it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(target.name + ".partial")
    shutil.copy2(built, partial)
    partial.replace(target)


class BuildOps(build_ext):
    def get_ext_filename(self, ext_name):
        # load_op_library opens it, not Python's import: no ABI tag.
        return ext_name.replace(".", os.sep) + ".so"

    def build_extension(self, ext):
        for built in build_ops():
            put(built, Path(self.build_lib, "het_tf", built.name))

    def copy_extensions_to_source(self):
        package = self.get_finalized_command("build_py").get_package_dir("het_tf")
        for built in Path(self.build_lib, "het_tf").glob("_het_ops.*"):
            put(built, Path(package, built.name))


class Wheel(bdist_wheel):
    def get_tag(self):
        # The library does not touch Python: one wheel serves every version of it.
        return "py3", "none", super().get_tag()[2]


if __name__ == "__main__":
    src = cxx.SOURCES
    sources = src.CORE_SOURCES + src.OP_SOURCES + src.DEVICE_SOURCES + src.CUDA_SOURCES
    setup(
        ext_modules=[Extension("het_tf._het_ops", sources)],
        cmdclass={"build_ext": BuildOps, "bdist_wheel": Wheel},
    )
