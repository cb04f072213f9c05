"""Builds and runs the C++ unit tests: tools/cpptest.py {release,asan,tsan} [--gtest_...]"""

import hashlib
import io
import subprocess
import sys
import tarfile
import tempfile
import urllib.error
import urllib.request
from pathlib import Path

import cxx

SANITIZER_FLAGS = ["-g1", "-O1", "-fno-omit-frame-pointer"]
VARIANTS = {
    "release": ["-g1", "-O2"],
    "asan": [*SANITIZER_FLAGS, "-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
    "tsan": [*SANITIZER_FLAGS, "-fsanitize=thread"],
}

GTEST_DEBIAN = Path("/usr/src/googletest/googletest")
GTEST_VERSION = "1.17.0"
GTEST_SHA256 = "3dc65ed118d82feb8276176354568e66acefee362d2b615e798bdd6c656377ff"
# The same file twice: each keeps it for as long as one of its releases has this version.
GTEST_URLS = [
    f"http://deb.debian.org/debian/pool/main/g/googletest/googletest_{GTEST_VERSION}.orig.tar.gz",
    f"http://archive.ubuntu.com/ubuntu/pool/universe/g/googletest/googletest_{GTEST_VERSION}.orig.tar.gz",
]


def download_googletest(directory: Path) -> None:
    for url in GTEST_URLS:
        try:
            with urllib.request.urlopen(url, timeout=60) as response:
                archive = response.read()
        except (urllib.error.URLError, TimeoutError) as e:
            print(f"{url}: {e}")
            continue
        if hashlib.sha256(archive).hexdigest() == GTEST_SHA256:
            break
        print(f"{url}: not the file that was pinned")
    else:
        raise SystemExit("the C++ tests need googletest: sudo apt-get install googletest")
    with tempfile.TemporaryDirectory(dir=directory.parent) as scratch:
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            tar.extractall(scratch)
        (top,) = Path(scratch).iterdir()
        top.rename(directory)


def own_googletest() -> Path:
    """Its folder in the tree, where it is put if it is not there."""
    directory = cxx.ROOT / f"build/googletest-{GTEST_VERSION}"
    with cxx.lock(directory.parent):
        if not directory.exists():
            download_googletest(directory)
    return directory


def googletest() -> Path:
    if (GTEST_DEBIAN / "src/gtest-all.cc").exists():
        return GTEST_DEBIAN
    return own_googletest() / "googletest"


def flags_of(variant: str, gtest: Path) -> list[str]:
    flags = [*cxx.SOURCES.CXX_FLAGS, *VARIANTS[variant], *cxx.ARCH_FLAGS, "-I."]
    return [*flags, "-isystem", f"{gtest}/include"]


def build_benchmark() -> Path:
    """The host build of the device's benchmark: to see that it runs, not for its times."""
    directory = cxx.ROOT / "build/release"
    src = cxx.SOURCES
    flags = flags_of("release", googletest())  # the tests', whose objects these are, too
    with cxx.lock(directory):
        objects = cxx.compile_objects(src.CORE_SOURCES, flags, directory)
        device_sources = [*src.CUDA_SOURCES, src.CUDA_BENCHMARK]
        objects += cxx.compile_objects(device_sources, [*flags, "-x", "c++"], directory)
        cxx.link(objects, ["-pthread"], directory / "step_bench")
    return directory / "step_bench"


def build(variant: str) -> Path:
    directory = cxx.ROOT / "build" / variant
    src = cxx.SOURCES
    gtest = googletest()
    flags = flags_of(variant, gtest)
    gtest_sources = [f"{gtest}/src/gtest-all.cc", f"{gtest}/src/gtest_main.cc"]
    with cxx.lock(directory):
        objects = cxx.compile_objects(src.CORE_SOURCES + src.CORE_TESTS, flags, directory)
        objects += cxx.compile_objects(src.DEVICE_SOURCES, flags, directory)
        # Of a .cu file g++ has to be told the language.
        objects += cxx.compile_objects(src.CUDA_SOURCES, [*flags, "-x", "c++"], directory)
        objects += cxx.compile_objects(src.CUDA_TESTS, flags, directory)
        objects += cxx.compile_objects(gtest_sources, [*flags, f"-I{gtest}"], directory)
        cxx.link(objects, ["-pthread", *VARIANTS[variant]], directory / "core_test")
    return directory / "core_test"


def run(variant: str, arguments: list[str]) -> int:
    command = [str(build(variant)), *arguments]
    if variant == "tsan":
        # Where addresses are randomised by over 28 bits, the ThreadSanitizer of GCC < 14 gives up.
        fixed_addresses = ["setarch", "-R"]
        if subprocess.run([*fixed_addresses, "true"], capture_output=True).returncode == 0:
            command = fixed_addresses + command
    return subprocess.run(command, cwd=cxx.ROOT).returncode


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in VARIANTS:
        raise SystemExit(__doc__)
    raise SystemExit(run(sys.argv[1], sys.argv[2:]))
