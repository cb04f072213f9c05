"""Makes the files beside it, with TFRA itself, and reads with it what het_tf wrote.

    python -m venv tfra && tfra/bin/pip install tensorflow-cpu==2.16.2 tf_keras==2.16.0 \
        keras==3.3.3 tensorflow-recommenders-addons==0.8.1     # Python 3.9 to 3.11
    tfra/bin/python tests/layer/tfra_files/write.py            # the files
    tfra/bin/python tests/layer/tfra_files/write.py FOLDER     # interop.Tfra(FOLDER, "rows", 4)
"""

import os
import pathlib
import sys

os.environ["TF_USE_LEGACY_KERAS"] = "1"

import numpy as np
import tensorflow as tf
import tensorflow_recommenders_addons as tfra
import tf_keras as keras

de = tfra.dynamic_embedding
HERE = pathlib.Path(__file__).parent
DIM = 4
KEYS = np.array([5, 7, -3, 1 << 40, 12, 90, 8], np.int64)
VALUES = np.arange(28, dtype=np.float32).reshape(7, DIM) / 7


def variable(name: str, shards: int):
    return de.get_variable(name, dim=DIM, devices=["/CPU:0"] * shards, initializer=0.0)


def write() -> None:
    rows = variable("rows", 2)
    rows.upsert(tf.constant(KEYS), tf.constant(VALUES))
    rows.save_to_file_system(str(HERE / "folder"), proc_size=1, proc_rank=0)

    embedding = de.keras.layers.Embedding(DIM, name="user", devices=["/CPU:0"] * 2)
    model = keras.Sequential([embedding, keras.layers.Flatten(), keras.layers.Dense(1)])
    model.compile(de.DynamicEmbeddingOptimizer(keras.optimizers.legacy.Adam(0.1)), "mse")
    ids = np.random.default_rng(0).integers(0, 30, (64, 3))
    model.fit(ids, np.ones(64), verbose=0)
    model.save_weights(str(HERE / "keras"))
    keys, values = embedding.params.export()
    np.savez(HERE / "keras.npz", keys=keys, values=values)

    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        with tf.compat.v1.variable_scope("scope"):
            rows = variable("rows", 2)
        for table in rows.tables:
            tf.compat.v1.add_to_collection("saveable_objects", table.saveable)
        session.run(rows.upsert(tf.constant(KEYS), tf.constant(VALUES)))
        tf.compat.v1.train.Saver().save(session, str(HERE / "saver"), write_meta_graph=False)
    for name in HERE.glob("checkpoint"):
        name.unlink()


def read(folder: str) -> None:
    for shards, everything in ((1, False), (2, True)):
        rows = variable("rows", shards)
        rows.load_from_file_system(folder, load_entire_dir=everything)
        assert rows.size() == len(KEYS), rows.size()
        np.testing.assert_array_equal(rows.lookup(KEYS), VALUES)
        rows.clear()
    print(f"TFRA {tfra.__version__} reads the {len(KEYS)} rows of {folder}, as 1 shard and as 2")


if __name__ == "__main__":
    read(sys.argv[1]) if len(sys.argv) > 1 else write()
