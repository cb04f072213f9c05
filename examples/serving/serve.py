"""Serves what train.py publishes, and says how fresh it is. It needs the ops, and no cluster.

python serve.py /tmp/het_tf_live --until 10

Prints a line for every version that it comes to serve: how old it is, how old the one before is by
then, and the prediction for one pair of ids.
"""

import argparse
import glob
import json
import time

import tensorflow as tf

import het_tf  # the ops


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", help="of the SavedModel; it is waited for")
    parser.add_argument("--until", type=int, help="the version after which to end")
    arguments = parser.parse_args()
    while not glob.glob(f"{glob.escape(arguments.folder)}/assets.extra/het_tf/*.whole"):
        time.sleep(0.1)
    begin = time.monotonic()
    model = tf.saved_model.load(arguments.folder)
    print(f"het_tf {het_tf.__version__}: loaded in {time.monotonic() - begin:.2f} s", flush=True)
    served, written = -1, None
    while arguments.until is None or served < arguments.until:
        click = float(model.serve(tf.constant([[1, 50]], tf.int64))[0, 0])
        fresh = model.freshness()
        if int(fresh["version"]) == served:
            time.sleep(0.05)
            continue
        served = int(fresh["version"])
        age = float(fresh["age_seconds"])
        line = {"version": served, "age_seconds": round(age, 3), "click": click}
        if written is not None:
            line["age_of_the_last"] = round(age + float(fresh["written"]) - written, 3)
        written = float(fresh["written"])
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
