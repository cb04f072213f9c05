"""Incremental C++ build that needs only Python and a compiler; setup.py and cpptest.py share it.

A file is built again when something it includes is newer, or its command, compiler or CPU changed.
Compilers run under ccache if it is installed. Everything but the files that include TensorFlow is
built in variants: `release` (the op library and its C++ tests), `asan`, `tsan` and `coverage`.
As a program it says in JSON with which CUDA the op library is built.
"""

import concurrent.futures
import contextlib
import fcntl
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parent.parent
COMPILER = shlex.split(os.environ.get("CXX", "g++"))
PORTABLE = os.environ.get("HET_TF_PORTABLE") == "1"


def load_sources() -> SimpleNamespace:
    """The lists and flags of ops/sources.bzl."""
    names: dict = {}
    exec((ROOT / "ops/sources.bzl").read_text(), names)
    return SimpleNamespace(**names)


SOURCES = load_sources()
ARCH_FLAGS = (
    SOURCES.PORTABLE_FLAGS.get(platform.machine(), []) if PORTABLE else SOURCES.NATIVE_FLAGS
)
SANITIZER_FLAGS = ["-g1", "-O1", "-fno-omit-frame-pointer"]
VARIANTS = {
    "release": [],
    "asan": [*SANITIZER_FLAGS, "-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
    "tsan": [*SANITIZER_FLAGS, "-fsanitize=thread"],
    "coverage": ["-g1", "-O1", "--coverage"],
}
CCACHE = [ccache] if (ccache := shutil.which("ccache")) else []
# Without this setting ccache does not cache sources that use a precompiled header.
COMPILER_ENV = {"CCACHE_SLOPPINESS": "pch_defines,time_macros", **os.environ}


def variant_directory(variant: str) -> Path:
    return ROOT / "build" / (f"{variant}-portable" if PORTABLE else variant)


def variant_flags(variant: str) -> list[str]:
    # The last of several -O counts.
    return [*SOURCES.CXX_FLAGS, *SOURCES.RELEASE_FLAGS, *VARIANTS[variant], *ARCH_FLAGS, "-I."]


def _ask_compiler(arguments: list[str]) -> subprocess.CompletedProcess:
    try:
        return subprocess.run([*COMPILER, *arguments], capture_output=True, text=True)
    except OSError as e:
        raise SystemExit(f"{COMPILER[0]}: {e.strerror}; sudo apt-get install g++") from e


def _is_gcc() -> bool:
    # clang says so, and so does Intel's compiler.
    return not any(name in _ask_compiler(["-v"]).stderr for name in ("clang", "Intel"))


def version() -> str:
    return _ask_compiler(["--version"]).stdout.splitlines()[0]


def nvcc_path() -> str | None:
    """CUDA's compiler, or None where there is none."""
    return shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")


def nvcc_to_build_with() -> str | None:
    """The nvcc with which the op library is built; None: in it the host takes a GPU's place.

    HET_TF_CUDA=1: wherever there is an nvcc; 0: nowhere; unset: where there is a GPU, too. (Without
    one it would take a minute longer to build and could not be tested.)
    """
    wanted = os.environ.get("HET_TF_CUDA", "")
    if wanted not in ("", "0", "1"):
        raise SystemExit(f"HET_TF_CUDA must be 0, 1 or unset, not {wanted!r}")
    if wanted == "0" or (not wanted and not Path("/proc/driver/nvidia/version").exists()):
        return None
    path = nvcc_path()
    if wanted and path is None:
        raise SystemExit("HET_TF_CUDA=1, but no nvcc: install the CUDA toolkit, or add it to PATH")
    return path


def cuda_version(nvcc: str) -> str:
    """As 13.0."""
    said = subprocess.check_output([nvcc, "--version"], text=True)
    return re.search(r"release (\d+\.\d+)", said)[1]


def cudart(nvcc: str) -> str:
    """The library that what nvcc compiled is linked with."""
    # On PATH may be a link to it, or a program that calls it.
    said = subprocess.run(
        [nvcc, "--dryrun", "-E", "-x", "cu", os.devnull], capture_output=True, text=True
    ).stderr
    root = Path(re.search(r"^#\$ TOP=(.*)$", said, re.MULTILINE)[1].strip()).resolve()
    for directory in ("lib64", f"targets/{platform.machine()}-linux/lib", "lib"):
        library = root / directory / "libcudart_static.a"
        if library.exists():
            return str(library)
    raise SystemExit(f"no libcudart_static.a in {root}: it is part of the CUDA toolkit")


def _resolved(flags: list[str]) -> str:
    """What the compiler makes of the flags: -march=native is another thing on another CPU."""
    return _ask_compiler([*flags, "-###", "-E", "-x", "c++", "/dev/null"]).stderr


@contextlib.contextmanager
def lock(directory: Path):
    """Two builds at once in one tree would write the same objects."""
    directory.mkdir(parents=True, exist_ok=True)
    with open(directory / ".lock", "w") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        yield


def _is_fresh(target: Path, inputs: list[str], record: str) -> bool:
    try:
        made = target.stat().st_mtime_ns
        if target.with_suffix(".cmd").read_text() != record:
            return False
        return all((ROOT / i).stat().st_mtime_ns <= made for i in inputs)
    except FileNotFoundError:
        return False


def _run(label: str, command: list[str], target: Path, record: str, keep_log: bool = False) -> bool:
    print(label, flush=True)
    started = time.time_ns()
    partial = target.with_name(target.name + ".partial")
    stderr = subprocess.PIPE if keep_log else None
    done = subprocess.run(
        [*command, "-o", str(partial)], cwd=ROOT, env=COMPILER_ENV, stderr=stderr, text=True
    )
    if done.returncode:
        print(done.stderr or "", "failed:", shlex.join(command), flush=True)
        return False
    if keep_log:
        target.with_suffix(".log").write_text(done.stderr)
    # The time of the start, so that an edit during a long compilation counts as newer.
    os.utime(partial, ns=(started, started))
    # A rename leaves a library that a running process has mapped as it was.
    partial.replace(target)
    target.with_suffix(".cmd").write_text(record)
    return True


def _depfile_inputs(depfile: Path) -> list[str]:
    text = depfile.read_text().replace("\\\n", " ").split(": ", 1)[1]
    return [p.replace("\\ ", " ") for p in re.split(r"(?<!\\)\s+", text.strip())]


def core_objects(variant: str, nvcc: str | None = None) -> list[Path]:
    """Objects of everything that includes neither TensorFlow nor googletest.

    The op library and the C++ tests link the same ones. Without nvcc the host takes a GPU's place.
    """
    flags, directory = variant_flags(variant), variant_directory(variant)
    with lock(directory):
        objects = compile_objects(SOURCES.CORE_SOURCES + SOURCES.DEVICE_SOURCES, flags, directory)
        if nvcc is None:
            objects += compile_objects(SOURCES.CUDA_SOURCES, flags, directory)
    return objects if nvcc is None else objects + cuda_objects(SOURCES.CUDA_SOURCES, nvcc)


def precompiled(name: str, headers: list[str], flags: list[str], directory: Path) -> list[str]:
    """Flags that make sources include `headers` first, which g++ then parses only once.

    Sources still include what they use: other compilers, and Bazel, get no such flags.
    """
    if not _is_gcc():
        return []
    header = directory / f"{name}.h"
    text = "".join(f"#include <{each}>\n" for each in headers)
    if not header.exists() or header.read_text() != text:
        directory.mkdir(parents=True, exist_ok=True)
        header.write_text(text)
    compile_objects([str(header.relative_to(ROOT))], flags, directory)
    return ["-Winvalid-pch", "-include", str(header.relative_to(ROOT))]


def cuda_objects(sources: list[str], nvcc: str, *flags: str) -> list[Path]:
    """Objects of `sources` that nvcc compiled, shared by all builds for this CPU, or portable ones.

    Its host compiler must get the core's architecture, or the two differ in how vectors are passed.
    """
    directory = ROOT / "build" / ("cuda-portable" if PORTABLE else "cuda")
    host_flags = [f"-Xcompiler={','.join(ARCH_FLAGS)}"] if ARCH_FLAGS else []
    with lock(directory):
        return compile_objects(
            sources, [*SOURCES.CUDA_FLAGS, *host_flags, "-I.", *flags], directory, nvcc=nvcc
        )


def compile_objects(
    sources: list[str], flags: list[str], directory: Path, nvcc: str | None = None
) -> list[Path]:
    """Objects of `sources` (relative to the root, or absolute), MAX_JOBS compilers at a time.

    With the path of nvcc it compiles them, and what it says lies beside each object, as a .log.
    """
    resolved = (
        _resolved(flags)
        if nvcc is None
        else subprocess.check_output([nvcc, "--version"], text=True)
    )
    compiler, ccache = (COMPILER, CCACHE) if nvcc is None else ([nvcc], [])

    def compile_one(source: str) -> Path | None:
        # A source from outside the tree (googletest) goes by its name.
        target = directory / (Path(source).name if os.path.isabs(source) else source)
        if target.suffix == ".h":
            # Where g++ looks for a header that it has precompiled.
            target, language = directory / f"{Path(source).name}.gch", ["-x", "c++-header"]
        else:
            # Of a .cu file g++ has to be told the language.
            language = ["-x", "c++"] if target.suffix == ".cu" and nvcc is None else []
            target = target.with_suffix(".o")
        depfile = target.with_suffix(".d")
        command = [*compiler, *flags, "-MMD", "-MF", str(depfile), *language, "-c", source]
        record = shlex.join(command) + "\n" + resolved
        if depfile.exists() and _is_fresh(target, _depfile_inputs(depfile), record):
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        label = f"{'CXX ' if nvcc is None else 'NVCC'} {source}"
        done = _run(label, [*ccache, *command], target, record, keep_log=nvcc is not None)
        return target if done else None

    jobs = int(os.environ.get("MAX_JOBS", len(os.sched_getaffinity(0))))
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        objects = list(pool.map(compile_one, sources))
    if None in objects:
        raise SystemExit("C++ compilation failed")
    return objects


def link(objects: list[Path], flags: list[str], target: Path, nvcc: str | None = None) -> None:
    command = [*(COMPILER if nvcc is None else [nvcc]), *map(str, objects), *flags]
    record = shlex.join(command)
    if not _is_fresh(target, [str(o) for o in objects], record) and not _run(
        f"LINK {target.relative_to(ROOT)}", command, target, record
    ):
        raise SystemExit("linking failed")


if __name__ == "__main__":
    nvcc = nvcc_to_build_with()
    found = nvcc and {"nvcc": nvcc, "cudart": cudart(nvcc), "version": cuda_version(nvcc)}
    print(json.dumps(found))
