"""Every source of the op library and how to compile it: bazel, setup.py and the C++ tests read this.

The file is both Starlark and Python: only assignments of literals.
"""

#Free of TensorFlow; what the C++ unit tests and sanitizers build.
CORE_SOURCES = [
    "ops/core/cache/cache.cc",
    "ops/core/cache/cache_closure.cc",
    "ops/core/cache/cache_install.cc",
    "ops/core/cache/cache_lookup.cc",
    "ops/core/cache/cache_pool.cc",
    "ops/core/cache/cache_update.cc",
    "ops/core/cache/row_cache.cc",
    "ops/core/cache/store.cc",
    "ops/core/cache/unsent.cc",
    "ops/core/dense/replica.cc",
    "ops/core/dense/replica_receive.cc",
    "ops/core/dense/shard.cc",
    "ops/core/guard/guard.cc",
    "ops/core/link/ask.cc",
    "ops/core/link/link.cc",
    "ops/core/link/watch.cc",
    "ops/core/memory/arena.cc",
    "ops/core/memory/file_arena.cc",
    "ops/core/memory/free_memory.cc",
    "ops/core/pooling.cc",
    "ops/core/row/initializer.cc",
    "ops/core/row/optimizer.cc",
    "ops/core/row/rule.cc",
    "ops/core/row/spec.cc",
    "ops/core/serving/manifest.cc",
    "ops/core/serving/rows_file.cc",
    "ops/core/serving/served.cc",
    "ops/core/plan/planner.cc",
    "ops/core/step/barrier.cc",
    "ops/core/table/answer.cc",
    "ops/core/table/changes.cc",
    "ops/core/table/gate.cc",
    "ops/core/table/lifetimes.cc",
    "ops/core/table/local.cc",
    "ops/core/table/rows.cc",
    "ops/core/table/snapshot.cc",
    "ops/core/table/step.cc",
    "ops/core/table/storage.cc",
    "ops/core/table/sweep.cc",
    "ops/core/table/sync.cc",
    "ops/core/table/table.cc",
    "ops/core/unique_ids.cc",
    "ops/core/wire/dense.cc",
    "ops/core/wire/frames.cc",
    "ops/core/wire/packed_keys.cc",
    "ops/core/wire/reply.cc",
    "ops/core/wire/request.cc",
]

#TensorFlow kernels and op registrations.
OP_SOURCES = [
    "ops/unique_ids_ops.cc",
    "ops/cache_ops.cc",
    "ops/checkpoint_ops.cc",
    "ops/dense_ops.cc",
    "ops/dense_step_ops.cc",
    "ops/message_ops.cc",
    "ops/kernels/unique_ids_kernels.cc",
    "ops/kernels/cache_kernels.cc",
    "ops/kernels/call_kernels.cc",
    "ops/kernels/checkpoint_kernels.cc",
    "ops/kernels/table_bundle.cc",
    "ops/kernels/dense_kernels.cc",
    "ops/kernels/dense_step_kernels.cc",
    "ops/kernels/destroy_kernels.cc",
    "ops/kernels/device_caches.cc",
    "ops/kernels/frames_kernels.cc",
    "ops/kernels/kernel_util.cc",
    "ops/kernels/keys_kernels.cc",
    "ops/kernels/plan_kernels.cc",
    "ops/kernels/pooling_kernels.cc",
    "ops/kernels/process_kernels.cc",
    "ops/kernels/program_kernels.cc",
    "ops/kernels/replica_handle_kernel.cc",
    "ops/kernels/replica_kernels.cc",
    "ops/kernels/rows_file_kernels.cc",
    "ops/kernels/served_resource.cc",
    "ops/kernels/serving_kernels.cc",
    "ops/kernels/step_kernels.cc",
    "ops/kernels/table_kernels.cc",
    "ops/kernels/trained_kernels.cc",
    "ops/plan_ops.cc",
    "ops/pooling_ops.cc",
    "ops/process_ops.cc",
    "ops/serving_ops.cc",
    "ops/step_ops.cc",
    "ops/table_ops.cc",
    "ops/trained_ops.cc",
]

#Those of them that know of GPUs : compiled anew with HET_TF_CUDA where nvcc compiles the kernels.
GPU_OP_SOURCES = [
    "ops/kernels/cache_kernels.cc",
    "ops/kernels/pooling_kernels.cc",
    "ops/kernels/trained_kernels.cc",
]

#What g++ parses once for all of them(tools / cxx.py) : most of the time that each would take.
TENSORFLOW_HEADERS = [
    "tensorflow/core/framework/common_shape_fns.h",
    "tensorflow/core/framework/op.h",
    "tensorflow/core/framework/op_kernel.h",
    "tensorflow/core/framework/resource_mgr.h",
    "tensorflow/core/framework/resource_var.h",
    "tensorflow/core/framework/shape_inference.h",
]

#googletest files, one beside each source it tests.
CORE_TESTS = [
    "ops/core/bfloat16_test.cc",
    "ops/core/cache/cache_failure_test.cc",
    "ops/core/cache/cache_schedule_test.cc",
    "ops/core/cache/cache_test.cc",
    "ops/core/cache/cache_thread_test.cc",
    "ops/core/cache/cache_watch_test.cc",
    "ops/core/cache/convergence_test.cc",
    "ops/core/cache/cowclip_test.cc",
    "ops/core/cache/eviction_test.cc",
    "ops/core/cache/paper_code_faults_test.cc",
    "ops/core/memory/file_arena_test.cc",
    "ops/core/memory/free_memory_test.cc",
    "ops/core/memory/sketch_test.cc",
    "ops/core/cache/store_test.cc",
    "ops/core/dense/replica_test.cc",
    "ops/core/dense/step_test.cc",
    "ops/core/guard/guard_test.cc",
    "ops/core/link/closures_test.cc",
    "ops/core/link/link_test.cc",
    "ops/core/link/sessions_test.cc",
    "ops/core/link/watch_test.cc",
    "ops/core/memory/index_test.cc",
    "ops/core/plan/planner_test.cc",
    "ops/core/pooling_test.cc",
    "ops/core/row/initializer_test.cc",
    "ops/core/row/optimizer_test.cc",
    "ops/core/row/spec_test.cc",
    "ops/core/serving/manifest_test.cc",
    "ops/core/serving/rows_file_test.cc",
    "ops/core/serving/served_test.cc",
    "ops/core/step/step_test.cc",
    "ops/core/table/changes_test.cc",
    "ops/core/table/counts_test.cc",
    "ops/core/table/gate_test.cc",
    "ops/core/table/key_repeats_test.cc",
    "ops/core/table/lifetimes_test.cc",
    "ops/core/table/memory_test.cc",
    "ops/core/table/snapshot_test.cc",
    "ops/core/table/storage_test.cc",
    "ops/core/table/sweep_test.cc",
    "ops/core/table/sync_test.cc",
    "ops/core/table/table_test.cc",
    "ops/core/unique_ids_test.cc",
    "ops/core/wire/frames_test.cc",
    "ops/core/wire/wire_test.cc",
]

#Those of them that start threads : ThreadSanitizer sees nothing in the others.
CORE_THREAD_TESTS = [
    "ops/core/cache/cache_test.cc",
    "ops/core/cache/cache_thread_test.cc",
    "ops/core/dense/replica_test.cc",
    "ops/core/link/closures_test.cc",
    "ops/core/memory/file_arena_test.cc",
    "ops/core/memory/index_test.cc",
    "ops/core/plan/planner_test.cc",
    "ops/core/pooling_test.cc",
    "ops/core/serving/served_test.cc",
    "ops/core/step/step_test.cc",
    "ops/core/table/changes_test.cc",
    "ops/core/table/counts_test.cc",
    "ops/core/table/key_repeats_test.cc",
    "ops/core/table/snapshot_test.cc",
    "ops/core/table/storage_test.cc",
    "ops/core/table/sweep_test.cc",
    "ops/core/table/sync_test.cc",
    "ops/core/table/table_test.cc",
    "ops/core/unique_ids_test.cc",
]

#Rows in a device's memory. Every compiler but nvcc makes the host build of it (ops/cuda/device.h).
CUDA_SOURCES = [
    "ops/cuda/evict.cu",
    "ops/cuda/find.cu",
    "ops/cuda/gather.cu",
    "ops/cuda/install.cu",
    "ops/cuda/memory.cu",
    "ops/cuda/pool.cu",
    "ops/cuda/push.cu",
    "ops/cuda/segment_sum.cu",
    "ops/cuda/store.cu",
    "ops/cuda/unique.cu",
    "ops/cuda/update.cu",
    "ops/cuda/watch.cu",
]

#What uses them and launches no kernel itself : the host's compiler compiles it, with CUDA too.
DEVICE_SOURCES = [
    "ops/cuda/block.cc",
    "ops/cuda/device_cache.cc",
    "ops/cuda/device_cache_ask.cc",
    "ops/cuda/device_cache_install.cc",
    "ops/cuda/device_cache_keep.cc",
    "ops/cuda/device_cache_lookup.cc",
    "ops/cuda/device_cache_pool.cc",
    "ops/cuda/device_cache_update.cc",
    "ops/cuda/host_rows.cc",
]

#Of all of that.The same objects are linked with the host build and with what nvcc compiled.
CUDA_TESTS = [
    "ops/cuda/batch_test.cc",
    "ops/cuda/device_cache_pool_test.cc",
    "ops/cuda/device_cache_test.cc",
    "ops/cuda/device_cache_threads_test.cc",
    "ops/cuda/host_rows_test.cc",
    "ops/cuda/row_cache_test.cc",
    "ops/cuda/schedule_test.cc",
    "ops/cuda/store_count_test.cc",
    "ops/cuda/store_test.cc",
    "ops/cuda/unwritten_test.cc",
    "ops/cuda/visitors_test.cc",
]

#Those that launch kernels of their own : nvcc compiles them, too.
CUDA_KERNEL_TESTS = ["ops/cuda/lanes_test.cc"]

#Of the host build alone.
HOST_BUILD_TESTS = [
    "ops/cuda/device_cache_memory_test.cc",
    "ops/cuda/lanes_threads_test.cc",
]

#What g++ parses once for all tests.None of this tree's: an edit of one would rebuild all.
TEST_HEADERS = [
    "gtest/gtest.h",
    "algorithm",
    "condition_variable",
    "deque",
    "functional",
    "map",
    "mutex",
    "random",
    "thread",
]

CUDA_BENCHMARK = "ops/cuda/step_bench.cu"

#Flags of every build, tests included.No contraction to FMA, because results must not depend on the
#vector width.No errno from std::sqrt, or loops with it would not be vectorized : a dense step of
#Adagrad takes 0.38 instead of 1.45 ms for 930, 000 weights.
CXX_FLAGS = [
    "-std=c++17",
    "-fPIC",
    "-pthread",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-Wall",
    "-Wextra",
]

#NDEBUG because TensorFlow's own build defines it and its headers test it.
RELEASE_FLAGS = ["-O3", "-DNDEBUG", "-fvisibility=hidden"]

#By machine(`uname - m`), for binaries that leave the machine they were built on.
PORTABLE_FLAGS = {"x86_64": ["-march=x86-64-v3"]}
#Without half precision : the Eigen of TensorFlow 2.21 does not compile where g++ 12 has it, as on
#Sapphire Rapids.
NATIVE_FLAGS = ["-march=native", "-U__AVX512FP16__"]

#A symbol that nobody defines fails here and not when the library is loaded.
LINK_FLAGS = ["-shared", "-pthread", "-Wl,-z,defs"]

#CUDA 's runtime is linked in, and its names are nobody else' s : TensorFlow has a stub of the same.
CUDA_LINK_FLAGS = ["-Wl,--exclude-libs,libcudart_static.a", "-ldl", "-lrt"]

#Of CUDA's compiler. As above, results do not depend on whether an FMA was at hand.
CUDA_FLAGS = [
    "-std=c++17",
    "-O3",
    "-fmad=false",
    "--expt-relaxed-constexpr",
    "-DNDEBUG",
    "-gencode=arch=compute_80,code=sm_80",
    "-gencode=arch=compute_90,code=[sm_90,compute_90]",
    "-Xptxas=-v",
    "-Xcompiler=-fPIC,-pthread,-ffp-contract=off,-fvisibility=hidden,-Wall,-Wno-psabi",
]
