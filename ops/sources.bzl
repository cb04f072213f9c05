"""Every source of the op library and how to compile it: bazel, setup.py and the C++ tests read this.

The file is both Starlark and Python: only assignments of literals.
"""

# Free of TensorFlow; what the C++ unit tests and sanitizers build.
CORE_SOURCES = [
    "ops/core/arena.cc",
    "ops/core/batch.cc",
    "ops/core/cache.cc",
    "ops/core/cache_fill.cc",
    "ops/core/cache_lookup.cc",
    "ops/core/cache_update.cc",
    "ops/core/initializer.cc",
    "ops/core/message.cc",
    "ops/core/optimizer.cc",
    "ops/core/spec.cc",
    "ops/core/table.cc",
    "ops/core/table_sync.cc",
]

# TensorFlow kernels and op registrations.
OP_SOURCES = [
    "ops/batch_ops.cc",
    "ops/cache_ops.cc",
    "ops/kernels/batch_kernels.cc",
    "ops/kernels/cache_kernels.cc",
    "ops/kernels/kernel_util.cc",
    "ops/kernels/process_kernels.cc",
    "ops/kernels/table_kernels.cc",
    "ops/process_ops.cc",
    "ops/table_ops.cc",
]

# googletest files, one beside each source it tests.
CORE_TESTS = [
    "ops/core/batch_test.cc",
    "ops/core/cache_failure_test.cc",
    "ops/core/cache_schedule_test.cc",
    "ops/core/cache_test.cc",
    "ops/core/cache_thread_test.cc",
    "ops/core/eviction_test.cc",
    "ops/core/index_test.cc",
    "ops/core/initializer_test.cc",
    "ops/core/message_test.cc",
    "ops/core/optimizer_test.cc",
    "ops/core/paper_code_faults_test.cc",
    "ops/core/spec_test.cc",
    "ops/core/table_sync_test.cc",
    "ops/core/table_test.cc",
]

# Flags of every build, tests included. No contraction to FMA, because results must not depend on the
# vector width.
CXX_FLAGS = ["-std=c++17", "-fPIC", "-pthread", "-ffp-contract=off", "-Wall", "-Wextra"]

# NDEBUG because TensorFlow's own build defines it and its headers test it.
RELEASE_FLAGS = ["-O3", "-DNDEBUG", "-fvisibility=hidden"]

# By machine (`uname -m`), for binaries that leave the machine they were built on.
PORTABLE_FLAGS = {"x86_64": ["-march=x86-64-v3"]}
NATIVE_FLAGS = ["-march=native"]

# A symbol that nobody defines fails here and not when the library is loaded.
LINK_FLAGS = ["-shared", "-pthread", "-Wl,-z,defs"]
