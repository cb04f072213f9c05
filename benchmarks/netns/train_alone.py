"""Trains one worker's share alone, in this process, one thread: `python -m netns.train_alone JOB`.

The same layer and model as in train_het_tf, with the table in the process and nobody to exchange
anything with. What that takes, a worker of a cluster cannot beat.
"""

from __future__ import annotations

import sys

import keras
import numpy as np
import one_process
from netns import wide_deep
from netns.job import Job, Session
from netns.train_het_tf import make_model


def main(job: Job) -> None:
    session = Session()
    one_process.single_threaded()
    model, layers, embedding = make_model(job, keras.Model)
    callback = wide_deep.epochs_callback(
        keras, session, job, layers, lambda keys: np.asarray(embedding.table.lookup(keys)), dict
    )
    model.fit(
        wide_deep.worker_data(job, job.worker),
        epochs=job.epochs,
        steps_per_epoch=job.steps // job.workers,
        callbacks=[callback],
        verbose=0,
    )


if __name__ == "__main__":
    main(Job.from_json(sys.argv[1]))
