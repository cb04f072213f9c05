"""Exports a table until there is no memory for it; prints the error and the size."""

from __future__ import annotations

import resource

import numpy as np
import tensorflow as tf

import het_tf

WIDTH = 1_000_000

table = het_tf.EmbeddingTable(WIDTH, het_tf.optimizers.SGD())
table.assign(np.arange(10), np.ones((10, WIDTH), np.float32))
with open("/proc/self/statm") as sizes:
    pages = int(sizes.read().split()[0])
limits = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (100 << 20), limits[1]))
kept = []
try:
    while True:
        kept.append(het_tf.ops.table_export(table.handle(0), 0, 1))
except tf.errors.ResourceExhaustedError as error:
    kept.clear()
    print(error.message)
print(table.size())
