"""Answers one query from an exported model, with nothing but TensorFlow: no het_tf, no cluster.

python serve.py FOLDER/saved_model '{"user": 1, "movie": 50, ...}'
"""

import json
import sys

import tensorflow as tf


def main(path: str, query: str) -> None:
    model = tf.saved_model.load(path)
    features = {
        name: tf.constant([value], tf.float32 if name == "integers" else tf.int64)
        for name, value in json.loads(query).items()
    }
    print(json.dumps({"click": float(model.serve(features)[0])}))


if __name__ == "__main__":
    main(*sys.argv[1:])
