"""Builds and runs C++ unit tests: tools/cpptest.py {core,release,asan,tsan,coverage} [--gtest_...]

core: as release, without the tests of ops/cuda.

Without further arguments the tests run in parts, on all cores, and of their output only that of
tests that failed is shown. With arguments, as --gtest_filter=SweepTest.*, they run in one process,
which shows everything.
"""

import concurrent.futures
import hashlib
import io
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

import cxx

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


def build_benchmark() -> Path:
    """The host build of the device's benchmark: to see that it runs, not for its times."""
    directory = cxx.variant_directory("release")
    objects = cxx.core_objects("release")
    with cxx.lock(directory):
        flags = cxx.variant_flags("release")
        objects += cxx.compile_objects([cxx.SOURCES.CUDA_BENCHMARK], flags, directory)
        cxx.link(objects, ["-pthread"], directory / "step_bench")
    return directory / "step_bench"


def test_flags(variant: str, gtest: Path) -> list[str]:
    # Tests compile in two thirds of the time of -O3. What they test is optimized as in the library.
    return [*cxx.variant_flags(variant), "-O1", "-isystem", f"{gtest}/include"]


def googletest_objects(gtest: Path) -> list[Path]:
    """The same for all variants: with a sanitizer they take four times as long to compile."""
    sources = [f"{gtest}/src/gtest-all.cc", f"{gtest}/src/gtest_main.cc"]
    directory = cxx.variant_directory("release")
    with cxx.lock(directory):
        flags = [*test_flags("release", gtest), f"-I{gtest}"]
        return cxx.compile_objects(sources, flags, directory)


def test_objects(variant: str, sources: list[str], gtest: Path) -> list[Path]:
    directory = cxx.variant_directory(variant)
    with cxx.lock(directory):
        flags = test_flags(variant, gtest)
        flags += cxx.precompiled("googletest", cxx.SOURCES.TEST_HEADERS, flags, directory)
        return cxx.compile_objects(sources, flags, directory)


def build(which: str) -> Path:
    src = cxx.SOURCES
    variant = "release" if which == "core" else which
    tests = src.CORE_THREAD_TESTS if variant == "tsan" else src.CORE_TESTS
    if which != "core":
        tests = tests + src.CUDA_TESTS + src.CUDA_KERNEL_TESTS + src.HOST_BUILD_TESTS
    gtest = googletest()
    objects = cxx.core_objects(variant) + test_objects(variant, tests, gtest)
    # Last, so that of the functions that they share with others the linker takes those of others.
    objects += googletest_objects(gtest)
    program = cxx.variant_directory(variant) / (
        "core_only_test" if which == "core" else "core_test"
    )
    with cxx.lock(program.parent):
        cxx.link(objects, ["-pthread", *cxx.VARIANTS[variant]], program)
    return program


def failures(output: str) -> str:
    """Of what a part printed, that of tests that failed or did not end; all if none is to blame."""
    tests = re.split(r"(?m)^(?=\[ RUN )", output)[1:]
    good = re.compile(r"(?m)^\[ +(OK|SKIPPED) +\]")
    # ThreadSanitizer reports in the output of a test that passes.
    blamed = [test for test in tests if not good.search(test) or "Sanitizer" in test]
    return "".join(blamed) or output


def run_parts(command: list[str]) -> int:
    """Runs every test once, in several processes."""
    started = time.monotonic()
    cores = len(os.sched_getaffinity(0))
    # More parts than cores, because some take far longer than others.
    parts = 8 * cores

    def run_part(part: int) -> subprocess.CompletedProcess:
        env = {**os.environ, "GTEST_TOTAL_SHARDS": str(parts), "GTEST_SHARD_INDEX": str(part)}
        return subprocess.run(
            command,
            cwd=cxx.ROOT,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )

    counts = dict.fromkeys(("OK", "SKIPPED", "FAILED"), 0)
    failed = False
    with concurrent.futures.ThreadPoolExecutor(cores) as pool:
        for done in pool.map(run_part, range(parts)):
            for outcome in counts:
                counts[outcome] += len(
                    re.findall(rf"(?m)^\[ +{outcome} +\] .* \(\d+ ms\)$", done.stdout)
                )
            if done.returncode:
                failed = True
                print(failures(done.stdout), f"exit status {done.returncode}", flush=True)
    print(
        f"{counts['OK']} C++ tests passed, {counts['FAILED']} failed, {counts['SKIPPED']} skipped,"
        f" in {time.monotonic() - started:.0f} s"
    )
    return int(failed)


def run(which: str, arguments: list[str]) -> int:
    command = [str(build(which)), *arguments]
    if which == "tsan":
        # Where addresses are randomised by over 28 bits, the ThreadSanitizer of GCC < 14 gives up.
        fixed_addresses = ["setarch", "-R"]
        if subprocess.run([*fixed_addresses, "true"], capture_output=True).returncode == 0:
            command = fixed_addresses + command
    if not arguments:
        return run_parts(command)
    return subprocess.run(command, cwd=cxx.ROOT).returncode


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in ("core", *cxx.VARIANTS):
        raise SystemExit(__doc__)
    raise SystemExit(run(sys.argv[1], sys.argv[2:]))
