"""The op library and its ops as Python functions.

`ops/*_ops.cc` register the ops. The Python functions have the generated names without the prefix:
`Het>CacheLookup` is `ops.cache_lookup`. `help(ops.cache_lookup)` shows its documentation.
"""

from __future__ import annotations

import ctypes
import functools
import json
import pathlib
import uuid
from typing import Any

import tensorflow as tf

LIBRARY = pathlib.Path(__file__).parent / "_het_ops.so"

_REMEDY = (
    "build it for this TensorFlow: `make ops` in a checkout, or"
    " `pip install --no-build-isolation .`"
)


def build(library: pathlib.Path = LIBRARY) -> dict[str, Any]:
    """Reads the build information of the op library without loading it.

    Args:
      library: path of the .so file. The information is in the .json file beside it.

    Returns:
      "tensorflow": version of TensorFlow for which the library was built. "cuda": version of CUDA
      for rows in a GPU's memory, or None for a build without CUDA.

    Raises:
      ImportError: the library is missing or incomplete.
    """
    try:
        note = json.loads(library.with_suffix(".json").read_text())
        return {"tensorflow": note["tensorflow"], "cuda": note.get("cuda")}
    except (OSError, ValueError, KeyError) as error:
        raise ImportError(
            f"the het_tf ops at {library} are missing or incomplete; {_REMEDY}"
        ) from error


def load(library: pathlib.Path = LIBRARY) -> Any:
    """Loads the op library into this process. Further calls have no effect.

    Args:
      library: path of the .so file, with the .json file of `build` beside it.

    Returns:
      The module of generated op functions.

    Raises:
      ImportError: the library is missing, was built for another TensorFlow, or does not load. The
        message has the remedy.
    """
    built_for = build(library)["tensorflow"]
    # The C++ interface of TensorFlow changes with every minor version.
    if built_for.split(".")[:2] != tf.__version__.split(".")[:2]:
        raise ImportError(
            f"the het_tf ops at {library} are built for TensorFlow {built_for}, but this is"
            f" TensorFlow {tf.__version__}; {_REMEDY}, or install tensorflow=={built_for}"
        )
    try:
        return tf.load_op_library(str(library))
    except (OSError, tf.errors.OpError) as error:
        raise ImportError(
            f"the het_tf ops at {library} do not load ({error}); {_REMEDY}"
        ) from error


_library = load()

# C functions that are called without the interpreter's lock (ops/core/guard/guard.h).
guard = ctypes.CDLL(str(LIBRARY))
guard.het_guard_probe.argtypes = [ctypes.c_char_p, ctypes.c_double]
guard.het_guard_start.argtypes = [ctypes.c_char_p, *3 * [ctypes.c_double]]
guard.het_guard_start.restype = ctypes.c_void_p
guard.het_guard_found.argtypes = [ctypes.c_void_p] * 3
guard.het_guard_found.restype = None
guard.het_guard_stop.argtypes = [ctypes.c_void_p]
guard.het_guard_stop.restype = None

# Container of this program's named resources on devices. Other programs have other containers.
CONTAINER = uuid.uuid4().hex

keys = _library.het_keys
unique_ids = _library.het_unique_ids
stack_ids = _library.het_stack_ids
check_ids = _library.het_check_ids
shard_of = _library.het_shard_of

trained = _library.het_trained

table_handle = functools.partial(_library.het_table_handle, container=CONTAINER)
table_lookup = _library.het_table_lookup
table_apply = _library.het_table_apply
table_sync = _library.het_table_sync
table_size = _library.het_table_size
table_stats = _library.het_table_stats
table_clear = _library.het_table_clear
table_expire = _library.het_table_expire
table_export = _library.het_table_export
table_import = _library.het_table_import
table_cut = _library.het_table_cut
table_cut_end = _library.het_table_cut_end
table_cut_changed = _library.het_table_cut_changed
table_forget_reader = _library.het_table_forget_reader
table_save = _library.het_table_save
table_save_rows = _library.het_table_save_rows
table_check = _library.het_table_check
table_restore = _library.het_table_restore

served_handle = _library.het_served_handle
served_open = _library.het_served_open
served_pin = _library.het_served_pin
served_lookup = _library.het_served_lookup
served_variables = _library.het_served_variables
served_status = _library.het_served_status

cache_handle = functools.partial(_library.het_cache_handle, container=CONTAINER)
cache_lookup = _library.het_cache_lookup
cache_install = _library.het_cache_install
cache_ask_again = _library.het_cache_ask_again
cache_gather = _library.het_cache_gather
cache_update = _library.het_cache_update
cache_make_room = _library.het_cache_make_room
cache_flush = _library.het_cache_flush
cache_begin_closure = _library.het_cache_begin_closure
cache_commit_closure = _library.het_cache_commit_closure
cache_end_closure = _library.het_cache_end_closure
cache_push = _library.het_cache_push
cache_keep = _library.het_cache_keep
cache_clear = _library.het_cache_clear
cache_stats = _library.het_cache_stats
cache_report = _library.het_cache_report
cache_counter_names = _library.het_cache_counter_names

cache_pool = _library.het_cache_pool
cache_update_pooled = _library.het_cache_update_pooled
table_pool = _library.het_table_pool
table_apply_pooled = _library.het_table_apply_pooled
pooling_gradient = _library.het_pooling_gradient
pooled_sums = _library.het_pooled_sums

process_tables = _library.het_process_tables
process_table = _library.het_process_table
process_caches = _library.het_process_caches
process_dense_shards = _library.het_process_dense_shards
process_dense_shard = _library.het_process_dense_shard
process_replicas = _library.het_process_replicas
process_replica = _library.het_process_replica
process_ends = _library.het_process_ends
destroy_later = functools.partial(_library.het_destroy_later, container=CONTAINER)
process_note_ended = _library.het_process_note_ended
process_ended = _library.het_process_ended
process_cache = _library.het_process_cache
program_handle = functools.partial(_library.het_program_handle, container=CONTAINER)

dense_handle = functools.partial(_library.het_dense_handle, container=CONTAINER)
dense_set = _library.het_dense_set
dense_get = _library.het_dense_get
dense_sync = _library.het_dense_sync

replica_handle = functools.partial(_library.het_replica_handle, container=CONTAINER)
replica_variables = _library.het_replica_variables
replica_destroy = _library.het_replica_destroy
replica_settle = _library.het_replica_settle
replica_urgent = _library.het_replica_urgent
replica_close = _library.het_replica_close
replica_request = _library.het_replica_request
replica_receive = _library.het_replica_receive
replica_own = _library.het_replica_own
replica_stats = _library.het_replica_stats
replica_report = _library.het_replica_report
replica_counter_names = _library.het_replica_counter_names

step_handle = functools.partial(_library.het_step_handle, container=CONTAINER)
step_begin = _library.het_step_begin
step_leave = _library.het_step_leave
step_join = _library.het_step_join
step_waiting = _library.het_step_waiting
serve_step = _library.het_serve_step
plan = _library.het_plan
plan_counts = _library.het_plan_counts

apply_adagrad = _library.het_apply_adagrad
apply_adam = _library.het_apply_adam

pack_frames = _library.het_pack_frames
unpack_frames = _library.het_unpack_frames
call_servers = _library.het_call_servers
await_replies = _library.het_await_replies
