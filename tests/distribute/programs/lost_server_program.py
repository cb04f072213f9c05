"""Loses parameter servers and goes on from checkpoints; prints what happened as JSON."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import sys
import tempfile
import threading
import time

import keras
import numpy as np
import tensorflow as tf
from faults import AtStep, Warnings

import het_tf
from het_tf.runtime.broadcast import cluster_devices
from het_tf.runtime.threads import call_in_daemon

BATCHES = 40
BATCH = 8
STEPS_A_CLOSURE = 4  # of which an epoch has a whole number
EPOCHS = 3


class Epochs(keras.callbacks.Callback):
    """Notes the epochs that begin, and saves with a manager where they end."""

    def __init__(self, manager=None):
        super().__init__()
        self.begun = []
        self._manager = manager

    def on_epoch_begin(self, epoch, logs=None):
        self.begun.append(epoch)

    def on_epoch_end(self, epoch, logs=None):
        if self._manager is not None:
            self._manager.save()


class Restarts(keras.callbacks.Callback):
    """Kills a server where one hook, then another, and so on is called, and starts it again.

    Attributes:
      left: the hooks that were not called yet.
    """

    def __init__(self, cluster, hooks):
        """hooks: names of methods of callbacks, epochs, indices of servers, and seconds for which
        the server is away."""
        super().__init__()
        self._cluster = cluster
        self.left = list(hooks)
        self._epoch = 0

    def _called(self, hook):
        if self.left and self.left[0][:2] == (hook, self._epoch):
            *_, index, seconds = self.left.pop(0)
            self._cluster.kill_ps(index)
            time.sleep(seconds)
            self._cluster.restart_ps(index)

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        self._called("on_train_batch_end")

    def on_test_batch_end(self, batch, logs=None):
        self._called("on_test_batch_end")

    def on_epoch_end(self, epoch, logs=None):
        self._called("on_epoch_end")


def make_model(strategy, storage=None):
    keras.utils.set_random_seed(1)
    with strategy.scope():
        ids = keras.Input((2,), dtype="int64")
        embedding = het_tf.layers.HetEmbedding(
            4,
            optimizer=het_tf.optimizers.Adagrad(0.1),
            seed=1,
            cache=het_tf.CacheConfig(50, staleness=5),
            storage=storage,
        )
        x = keras.layers.Flatten()(embedding(ids))
        model = het_tf.keras.Model(ids, keras.layers.Dense(1, name="dense")(x))
        model.compile(keras.optimizers.Adagrad(0.1), "mse", steps_per_execution=STEPS_A_CLOSURE)
    return model, embedding


def call_across_servers(strategy, cluster):
    """A function whose part on server 1 takes a value from server 0, which is lost meanwhile.

    Returns:
      Whether a server was recovered, what the first call after that raised, if so, and whether
      server 1 had a connection to server 0 then.
    """

    def make():
        devices = cluster_devices("ps")
        with tf.device(devices[0]):
            there = tf.Variable(1.0)
        with tf.device(devices[1]):
            here = tf.Variable(1.0)

        @tf.function(autograph=False)
        def add():
            with tf.device(devices[1]):
                return here.assign_add(there.read_value())

        def call():
            with tf.device(strategy.worker_device(0)):
                return float(add())

        return call

    call = make()
    call()
    cluster.kill_ps(0)
    restarting = call_in_daemon(cluster.restart_ps, 0)
    while not restarting.done():  # The later gRPC tried, the longer it waits to try again.
        with contextlib.suppress(tf.errors.OpError):
            call()
    restarting.result()
    strategy.wait_until_reached()  # by servers that are lost: not
    recovered = strategy.recover()
    # What /proc lists while connections come and go may lack one that is there.
    where = cluster.process("ps", 1).pid, cluster.addresses["ps"][0]
    connected = any(is_connected(*where) for _ in range(5))
    call = make()
    try:
        call()
    except tf.errors.OpError as error:
        return {"recovered": recovered, "error": str(error), "connected": connected}
    return {"recovered": recovered, "error": None, "connected": connected}


def is_connected(pid, address):
    """Whether a process has a connection to "host:port"."""
    port = int(address.rpartition(":")[2])
    peers = {}  # inode of a socket -> its peer's port
    for family in ("tcp", "tcp6"):
        for line in pathlib.Path(f"/proc/{pid}/net/{family}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "01":  # TCP_ESTABLISHED
                peers[f"socket:[{fields[9]}]"] = int(fields[2].rpartition(":")[2], 16)
    sockets = set()
    for descriptor in pathlib.Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # It is closed meanwhile.
            sockets.add(os.readlink(descriptor))
    return port in {peers.get(name) for name in sockets}


def wait_until(holds):
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


class Served:
    """A model that was loaded once, and follows what is published."""

    def __init__(self, folder):
        self._model = tf.saved_model.load(folder)

    def compare(self, model, version):
        """Once that version is served: how far answers are off, and what the server says."""
        wait_until(lambda: int(self._model.freshness()["version"]) >= version)
        ids = np.arange(200).reshape(100, 2)  # half of which nobody has trained
        off = np.abs(self._model.serve(ids).numpy() - model.predict(ids, verbose=0)).max()
        fresh = self._model.freshness()
        return {
            "off": float(off),
            "version": int(fresh["version"]) - version,
            "trouble": fresh["trouble"].numpy().decode(),
        }


def main():
    logged = Warnings()
    cluster = het_tf.distribute.LocalCluster(num_workers=1, num_ps=2)
    cluster.start()
    strategy = het_tf.distribute.HetParameterServerStrategy(cluster.resolver)
    across = call_across_servers(strategy, cluster)
    rng = np.random.default_rng(1)
    x = rng.integers(0, 100, (BATCHES * BATCH, 2))
    y = (x % 3 == 0).sum(1).astype(np.float32)

    def rows_and_weights(made):
        model, embedding = made
        rows = embedding.table.export()
        order = np.argsort(rows.keys)
        return {
            "keys": rows.keys[order].tolist(),
            "rows": np.concatenate([rows.values, rows.slots], 1)[order].ravel().tolist(),
            "dense": [float(v) for w in model.get_layer("dense").get_weights() for v in w.ravel()],
            "iterations": int(model.optimizer.iterations.numpy()),
        }

    def fit(made, *callbacks, epochs=EPOCHS, **arguments):
        logged.take()
        noted = next((c for c in callbacks if isinstance(c, Epochs)), Epochs())
        history = made[0].fit(
            *(x, y),
            batch_size=BATCH,
            epochs=epochs,
            shuffle=False,
            verbose=0,
            callbacks=[*callbacks, *([] if noted in callbacks else [noted])],
            **arguments,
        )
        return {
            "epochs": noted.begun,
            "warnings": logged.take(),
            "loss": history.history["loss"],
            **rows_and_weights(made),
        }

    def uses(made):
        """What functions give that were traced before."""
        model = made[0]
        return {
            "loss": float(model.evaluate(x, y, batch_size=BATCH, verbose=0)),
            "predicted": model.predict(x, batch_size=BATCH, verbose=0).ravel().tolist(),
            **rows_and_weights(made),
        }

    def lose(index, at):
        """A callback that kills a server after so many steps, which is back a second later."""

        def run():
            cluster.kill_ps(index)
            time.sleep(1)
            cluster.restart_ps(index)

        seen = []

        class Later(AtStep):
            def on_train_batch_end(self, batch, logs=None):
                seen.append(batch)
                super().on_train_batch_end(STEPS_A_CLOSURE * len(seen))

        return Later(at, lambda: threading.Thread(target=run).start())

    out = {"across servers": across}
    made = make_model(strategy)
    out["whole"] = fit(made)
    out["one more epoch"] = fit(made, epochs=1)
    with tempfile.TemporaryDirectory() as folder:
        backup = keras.callbacks.BackupAndRestore(f"{folder}/keras")
        # In the first epoch, when there is no backup yet, and in the second.
        losses = lose(0, at=BATCHES // 2), lose(1, at=2 * BATCHES)
        out["Keras's backup"] = fit(make_model(strategy), backup, *losses)

        backup = het_tf.keras.callbacks.BackupAndRestore(f"{folder}/ours")
        restarts = Restarts(
            cluster,
            [("on_test_batch_end", 1, 1, 1), ("on_epoch_end", 2, 0, 0)],
        )
        made = make_model(strategy)
        with het_tf.serving.publish(made[0], f"{folder}/live", every=0.3) as publisher:
            served = Served(f"{folder}/live")
            validation = {"validation_data": (x, y), "validation_freq": 2}
            out["our backup"] = fit(made, backup, publisher, restarts, **validation)
            out["versions in fit"] = in_fit = publisher.version
            # Its thread goes on, too, which met the loss.
            wait_until(lambda: publisher.version > in_fit + 1)
        out["served"] = served.compare(made[0], publisher.version)
        out["hooks left"] = restarts.left

        strategy.dense_staleness = 5
        backup = het_tf.keras.callbacks.BackupAndRestore(f"{folder}/replicas")
        restarts = Restarts(cluster, [("on_train_batch_end", 1, 1, 0)])
        out["replicas"] = fit(make_model(strategy), backup, restarts)
        strategy.dense_staleness = None

        # A lost server has lost the rows on its disk, too. Not in `folder`, which may be in memory.
        on_disk = het_tf.Storage("256KiB", str(pathlib.Path(__file__).resolve().parents[3]))
        made = make_model(strategy, on_disk)
        checkpoint = tf.train.Checkpoint(model=made[0])
        manager = tf.train.CheckpointManager(checkpoint, f"{folder}/checkpoints", max_to_keep=2)
        out["nothing to restore"] = strategy.restore_or_initialize(manager)
        out["manager"] = fit(made, Epochs(manager), lose(1, at=BATCHES + BATCHES // 2))
        # While nothing is trained, and back before anybody notices.
        out["before a loss"] = uses(made)
        cluster.kill_ps(0)
        cluster.restart_ps(0)
        strategy.restore_or_initialize(manager)
        out["after a loss"] = uses(made)
        out["one more epoch after a loss"] = fit(made, epochs=1)

        # As a training program that was started again does.
        fresh, embedding = make_model(strategy)
        checkpoint = tf.train.Checkpoint(model=fresh)
        manager = het_tf.checkpoint.Manager(checkpoint, f"{folder}/checkpoints")
        out["latest"] = manager.latest_checkpoint
        out["restored"] = strategy.restore_or_initialize(manager)
        out["rows restored"] = embedding.table.size()
    print(json.dumps(out))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
