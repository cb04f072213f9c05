"""Has clang check the lock annotations of ops/core/thread_annotations.h.

clang-tidy is clang's front end on PyPI. It reads every source of ops/core, and of the device cache,
that needs no TensorFlow, and headers with annotations that no such source belongs to. A guarded
member that is used without its lock is an error. What does not compile with clang is one, too.
"""

import concurrent.futures
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import cxx

CLANG_TIDY = Path(sysconfig.get_path("scripts"), "clang-tidy")
# What the compiler says, and no check of clang-tidy's own.
CHECKS = "-*,clang-diagnostic-error,clang-diagnostic-thread-safety*"
FLAGS = [*cxx.SOURCES.CXX_FLAGS, *cxx.ARCH_FLAGS, "-I.", "-Wno-everything", "-Wthread-safety"]


def headers_without_source() -> list[str]:
    headers = [header.relative_to(cxx.ROOT) for header in (cxx.ROOT / "ops/core").rglob("*.h")]
    return sorted(
        str(header)
        for header in headers
        if not (cxx.ROOT / header).with_suffix(".cc").exists()
        and "HET_GUARDED_BY(" in (cxx.ROOT / header).read_text()
    )


def check(path: str) -> str | None:
    """What is wrong with a file, or None."""
    command = [str(CLANG_TIDY), "--quiet", "--allow-no-checks", f"--checks={CHECKS}"]
    command += ["--warnings-as-errors=*", path, "--", *FLAGS, "-x", "c++"]
    done = subprocess.run(command, cwd=cxx.ROOT, capture_output=True, text=True)
    return None if done.returncode == 0 else done.stdout + done.stderr


def main() -> int:
    paths = cxx.SOURCES.CORE_SOURCES + cxx.SOURCES.DEVICE_SOURCES + headers_without_source()
    with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        findings = [found for found in pool.map(check, paths) if found]
    print(*findings, sep="\n", end="")
    print(f"{len(paths)} files checked for locks, {len(findings)} with findings")
    return int(bool(findings))


if __name__ == "__main__":
    sys.exit(main())
