"""FBGEMM's side of local_step.py, in its own environment: no TensorFlow, no het_tf.

local_step_fbgemm.py FBGEMM IDS.npy ROWS DIM THREADS STEPS; the last line is JSON: milliseconds.
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
    BoundsCheckMode,
    EmbeddingLocation,
    PoolingMode,
)
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)


def main() -> None:
    _, path, *numbers = sys.argv[1:]
    rows, dim, threads, steps = map(int, numbers)
    torch.set_num_threads(threads)
    batches = [torch.from_numpy(ids) for ids in np.load(path)]
    n = batches[0].numel()
    # Bags of one id: without pooling its CPU code takes seven times as long. Ids are not checked.
    table = SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, dim, EmbeddingLocation.HOST, ComputeDevice.CPU)],
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=0.05,
        eps=1e-7,
        pooling_mode=PoolingMode.SUM,
        bounds_check_mode=BoundsCheckMode.NONE,
    )
    table.init_embedding_weights_uniform(-0.05, 0.05)
    offsets = torch.arange(n + 1)
    gradients = torch.randn(n, dim) * 0.01

    def forward(i: int) -> None:
        with torch.no_grad():
            table(batches[i % len(batches)], offsets)

    def step(i: int) -> None:
        table(batches[i % len(batches)], offsets).backward(gradients)

    said = {}
    for name, part in (("forward", forward), ("step", step)):
        times = []
        for i in range(-len(batches), steps):
            start = time.perf_counter()
            part(i)
            if i >= 0:  # the first round warms up
                times.append(time.perf_counter() - start)
        said[name] = 1000 * float(np.median(times))
    print(json.dumps(said))


if __name__ == "__main__":
    main()
