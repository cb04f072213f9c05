"""ops/cuda with CUDA's compiler, and on a GPU:
tools/gpu.py {kernels,load,test,bench,fetch} [arguments]

kernels   compiles every kernel for sm_80 and sm_90, lists its registers, and fails where registers
          are spilled to memory. Compiles the test that has kernels and the benchmark, too, so that
          they are known to where there is no GPU. Needs nvcc; where there is none it says so and
          does nothing.
load      builds the op library with CUDA, in a copy of the package, and runs the tests of caches on
          a device and of the layer with it; on the GPU, where CUDA_VISIBLE_DEVICES says which.
          Needs nvcc; where there is none it says so and does nothing.
test      runs the C++ tests of ops/cuda on a GPU, then under compute-sanitizer, one tool after the
          other. --tool=memcheck (initcheck, synccheck): under that alone; --tool=none:
          without. Other arguments go to the tests (--gtest_filter=...). A tool makes each of the
          random schedules' million launches many times as long: under one they are left out, unless
          a filter is given. All tools run, and those that failed are named at the end.
bench     benchmarks/gpu_step.py, to which the arguments go. --host: with the host build, which
          shows that it runs.
fetch     has googletest in build/, for a machine that reaches no network: what it prints is to be
          there beside the tree.

test and bench need nvcc and a GPU, and no TensorFlow.
"""

import collections
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import cpptest
import cxx

DIRECTORY = cxx.ROOT / "build/gpu"
# racecheck looks at shared memory, of which no kernel here has any.
SANITIZER_TOOLS = ["memcheck", "initcheck", "synccheck"]
SANITIZED_TESTS = "--gtest_filter=-*RowCacheScheduleTest*"  # googletest takes the last filter


def nvcc() -> str:
    path = cxx.nvcc_path()
    if path is None:
        raise SystemExit("no nvcc here: install the CUDA toolkit, or add its bin to PATH")
    return path


def kernels_of(log: str) -> list[tuple[str, str, int, int]]:
    """(mangled name, architecture, registers, bytes spilled) of each kernel that ptxas reports."""
    entry = re.compile(
        r"Compiling entry function '(\S+)' for '(sm_\d+)'.*?"
        r"(\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers",
        re.DOTALL,
    )
    return [
        (name, arch, int(registers), int(stores) + int(loads))
        for name, arch, stores, loads, registers in entry.findall(log)
    ]


def readable(mangled: list[str]) -> list[str]:
    """Names as in the sources, without namespaces, arguments and CUB's policies."""
    names = subprocess.run(
        ["c++filt"], input="\n".join(mangled), capture_output=True, text=True, check=True
    ).stdout.splitlines()
    short = []
    for name in names:
        if cub := re.search(r"\b(Device\w+Kernel|EmptyKernel)\b", name):
            short.append(f"cub {cub[1]}")
            continue
        name = re.sub(r"\(anonymous namespace\)::|\w+::", "", name)
        short.append(re.sub(r"^void |\(.*", "", name).replace(" >", ">"))
    return short


def kernels() -> None:
    if cxx.nvcc_path() is None:
        print("no nvcc here: the kernels are not compiled")
        return
    objects = cxx.cuda_objects(cxx.SOURCES.CUDA_SOURCES, nvcc())
    found = [k for o in objects for k in kernels_of(o.with_suffix(".log").read_text())]
    registers: dict = collections.defaultdict(dict)
    spilled = []
    for (_, arch, used, spills), name in zip(found, readable([k[0] for k in found]), strict=True):
        registers[name][arch] = max(used, registers[name].get(arch, 0))
        if spills:
            spilled.append(f"{name} for {arch}: {spills} bytes")
    print("registers: sm_80 sm_90")
    for name, by_arch in sorted(registers.items()):
        print(f"{by_arch.get('sm_80', '-'):>16} {by_arch.get('sm_90', '-'):>5}  {name}")
    ours = [name for name in registers if not name.startswith("cub ")]
    complete = all({"sm_80", "sm_90"} <= registers[name].keys() for name in ours)
    if not ours or not complete:
        raise SystemExit("ptxas did not report every kernel for both architectures")
    if spilled:
        raise SystemExit("registers are spilled:\n" + "\n".join(spilled))
    print(f"{len(ours)} kernels, no register spilled")
    cxx.cuda_objects([cxx.SOURCES.CUDA_BENCHMARK], nvcc())
    kernel_test_objects(cpptest.googletest())


def load() -> None:
    if cxx.nvcc_path() is None:
        print("no nvcc here: the ops are not built with CUDA")
        return
    package = cxx.ROOT / "build/cuda-package"
    shutil.rmtree(package, ignore_errors=True)
    shutil.copytree(cxx.ROOT / "het_tf", package / "het_tf")
    env = os.environ | {"HET_TF_CUDA": "1"}
    build = ["setup.py", "-q", "build_ext", "--build-lib", str(package)]
    names = [
        "ops/test_device_caches.py",
        "layer/test_device_rows.py",
        "layer/test_layer.py::test_fit_trains_the_table",
    ]
    names += ["protocol/test_device_ops.py", "distribute/test_device_fit.py"]
    tests = ["-m", "pytest", "-rs", *(str(cxx.ROOT / "tests" / name) for name in names)]
    # Python finds the package where it is started.
    for arguments, folder in ((build, cxx.ROOT), (tests, package)):
        if subprocess.run([sys.executable, *arguments], cwd=folder, env=env).returncode:
            raise SystemExit(1)


def kernel_test_objects(gtest: Path) -> list[Path]:
    flags = ["-x", "cu", "-isystem", f"{gtest}/include"]
    return cxx.cuda_objects(cxx.SOURCES.CUDA_KERNEL_TESTS, nvcc(), *flags)


def build_tests() -> Path:
    gtest = cpptest.googletest()
    objects = cxx.core_objects("release", nvcc())
    objects += cpptest.test_objects("release", cxx.SOURCES.CUDA_TESTS, gtest)
    objects += kernel_test_objects(gtest)
    objects += cpptest.googletest_objects(gtest)
    with cxx.lock(DIRECTORY):
        cxx.link(objects, ["-Xcompiler=-pthread"], DIRECTORY / "cuda_test", nvcc=nvcc())
    return DIRECTORY / "cuda_test"


def require_gpu() -> None:
    smi = shutil.which("nvidia-smi")
    if smi is None or subprocess.run([smi, "-L"], capture_output=True).returncode:
        raise SystemExit("built; there is no GPU here to run it on (nvidia-smi -L)")


def sanitizer() -> str:
    beside_nvcc = shutil.which("compute-sanitizer", path=f"{Path(nvcc()).resolve().parent}")
    found = beside_nvcc or shutil.which("compute-sanitizer")
    if found is None:
        raise SystemExit(
            "no compute-sanitizer here: it is part of the CUDA toolkit; --tool=none runs the tests"
            " without it"
        )
    return found


def test(arguments: list[str]) -> None:
    tools = [each.removeprefix("--tool=") for each in arguments if each.startswith("--tool=")]
    arguments = [each for each in arguments if not each.startswith("--tool=")]
    for tool in tools:
        if tool not in ("none", *SANITIZER_TOOLS):
            raise SystemExit(f"--tool={tool} must be none or of {', '.join(SANITIZER_TOOLS)}")
    tools = tools or ["none", *SANITIZER_TOOLS]
    checks = {tool: [sanitizer(), "--tool", tool] for tool in tools if tool != "none"}
    binary = str(build_tests())
    require_gpu()
    failed = []
    for tool in tools:
        command = [binary, *arguments]
        if tool != "none":
            command = [*checks[tool], "--error-exitcode", "1", binary, SANITIZED_TESTS, *arguments]
        print(" ".join(command), flush=True)
        if subprocess.run(command, cwd=cxx.ROOT).returncode:
            failed.append(tool)
    if failed:
        raise SystemExit(f"failed, of {', '.join(tools)}: {', '.join(failed)}")


def build_benchmark() -> Path:
    objects = cxx.core_objects("release", nvcc())
    objects += cxx.cuda_objects([cxx.SOURCES.CUDA_BENCHMARK], nvcc())
    with cxx.lock(DIRECTORY):
        cxx.link(objects, ["-Xcompiler=-pthread"], DIRECTORY / "step_bench", nvcc=nvcc())
    require_gpu()
    return DIRECTORY / "step_bench"


def bench(arguments: list[str]) -> None:
    on_host = "--host" in arguments
    program = cpptest.build_benchmark() if on_host else build_benchmark()
    arguments = [each for each in arguments if each != "--host"]
    command = [sys.executable, "benchmarks/gpu_step.py", str(program), *arguments]
    raise SystemExit(subprocess.run(command, cwd=cxx.ROOT).returncode)


def fetch() -> None:
    print(cpptest.own_googletest().relative_to(cxx.ROOT))


if __name__ == "__main__":
    if sys.argv[1:] in (["kernels"], ["load"], ["fetch"]):
        {"kernels": kernels, "load": load, "fetch": fetch}[sys.argv[1]]()
    elif len(sys.argv) > 1 and sys.argv[1] in ("test", "bench"):
        {"test": test, "bench": bench}[sys.argv[1]](sys.argv[2:])
    else:
        raise SystemExit(__doc__)
