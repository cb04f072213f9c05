"""Training on hosts with a network of a given rate: het_tf beside tf_keras.

    sudo .venv/bin/python benchmarks/netns_cluster.py --rates=none,1gbit --json=out/netns.json
    sudo .venv/bin/python benchmarks/netns_cluster.py --rates=100mbit --workers=8 --servers=1 \\
        --steps=20 --epochs=3 --timeout=900 --json=out/netns.json

Every task of a cluster, the chief, the workers and the parameter servers, has a network namespace
to itself, whose link to the others has a rate in both directions (netns/network.py: needs root; no
delay, since that needs netem). All share this machine's cores: with workers enough that they are
short of cores, a slower network shows what the network does.

All train the same model (netns/wide_deep.py) on the same batches in the same order, ids and labels
of the shape of Criteo's (netns/criteo_shape.py), with Adagrad at one learning rate:

  alone      each worker in a process of its own with one thread, its table in the process, no
             servers: what a cluster of as many workers cannot beat
  tf_keras   tf_keras's Embedding on tf.distribute.ParameterServerStrategy, installed beside this
             environment, pinned
  no_cache   HetEmbedding without a cache
  s0, default, s100
             HetEmbedding with a cache of --capacity rows: staleness 0, CacheConfig's own bounds,
             staleness 100

The last four once for every --dense_staleness: "none" is TensorFlow's own way, every dense variable
on its server; a number goes to HetParameterServerStrategy. HetEmbedding has row-wise Adagrad, its
own default, unless --row_optimizer=adagrad gives it tf_keras's.

An epoch is --steps steps of each worker. The first one is not counted: in it TensorFlow traces,
caches fill, and the network has no limit, nor has it while the AUC is measured. The table has
medians of the others:

  ms/step     of one worker, while the others take theirs. (For a step of the whole cluster, as if
              its workers were one, divide by their number.)
  sent, got   kB (1000 bytes) that a worker's interface counts a step; then the two together by kind
              (netns/runs.py says how; "123+" is with the rest)
  messages    exchanges of the embedding a step
  compute, in messages, waiting
              shares of a worker's time (Figures.shares says how; they need "alone")
  servers' CPU ms
              of all servers for one step of one worker
  AUC         on held-out samples after as many examples for all; the mean, and the standard
              deviation over --seeds
  s to AUC    training time to an AUC: --target_auc, by default one that all of the table reach

Every run is put into --json when it ends, and a run that is there already is not made again. Exit
status 77 (EX_NOPERM) where network namespaces may not be made.
"""

from __future__ import annotations

import os
import pathlib
import signal
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

from absl import app, flags
from netns import criteo_shape, measure, network, report, runs, tf_keras_environment
from netns.job import Job
from netns.runs import ALONE, CACHES, TF_KERAS, VARIANTS, Run, Setting, Sizes

_WORKERS = flags.DEFINE_integer("workers", 2, "worker tasks", lower_bound=1)
_SERVERS = flags.DEFINE_integer("servers", 2, "parameter server tasks", lower_bound=1)
_RATES = flags.DEFINE_list("rates", ["none", "1gbit"], "of every host: none, or as tc takes it")
_VARIANTS = flags.DEFINE_list("variants", list(VARIANTS), f"of {', '.join(VARIANTS)}")
_DENSE_STALENESS = flags.DEFINE_list(
    "dense_staleness", ["none"], "none, or of HetParameterServerStrategy; one run each"
)
_LOOKAHEAD = flags.DEFINE_integer("lookahead", None, "of CacheConfig; not given by default")
_STEPS = flags.DEFINE_integer("steps", 100, "of a worker and epoch", lower_bound=1)
_EPOCHS = flags.DEFINE_integer("epochs", 4, "the first of them for warming up", lower_bound=2)
_STEPS_PER_EXECUTION = flags.DEFINE_integer("steps_per_execution", 20, "steps of a closure")
_BATCH = flags.DEFINE_integer("batch", 128, "samples of a step")
_DIM = flags.DEFINE_integer("dim", 128, "columns of a row")
_HIDDEN = flags.DEFINE_list("hidden", ["256", "256"], "widths of the hidden layers")
_CAPACITY = flags.DEFINE_integer("capacity", criteo_shape.KEYS // 10, "rows of a worker's cache")
_LEARNING_RATE = flags.DEFINE_float("learning_rate", 0.05, "of Adagrad")
_ROW_OPTIMIZER = flags.DEFINE_enum(
    "row_optimizer", "rowwise_adagrad", ["rowwise_adagrad", "adagrad"], "of HetEmbedding"
)
_HELD_OUT = flags.DEFINE_integer("held_out", 16_384, "samples that the AUC is measured on")
_SEEDS = flags.DEFINE_integer("seeds", 1, "runs of every setting, with seeds 1, 2, ...")
_TARGET = flags.DEFINE_float("target_auc", None, "of the time to it")
_TIMEOUT = flags.DEFINE_float("timeout", 300.0, "seconds that an epoch may take")
_JSON = flags.DEFINE_string("json", None, "file of the runs, appended to")
_TABLE = flags.DEFINE_string("table", None, "file to write the table to")
_PLOT = flags.DEFINE_string("plot", None, "file to draw the picture to")


def sizes() -> Sizes:
    """The sizes of all runs, from the flags."""
    return Sizes(
        epochs=_EPOCHS.value,
        steps=_STEPS.value,
        steps_per_execution=_STEPS_PER_EXECUTION.value,
        batch=_BATCH.value,
        dim=_DIM.value,
        hidden=tuple(int(units) for units in _HIDDEN.value),
        capacity=_CAPACITY.value,
        held_out=_HELD_OUT.value,
        learning_rate=_LEARNING_RATE.value,
        row_optimizer=_ROW_OPTIMIZER.value,
    )


def settings() -> Iterator[Setting]:
    """What is to be run, from the flags; what is compared with one another close together."""
    rates = [None if rate == "none" else rate for rate in _RATES.value]
    dense = [None if bound == "none" else int(bound) for bound in _DENSE_STALENESS.value]
    for seed in range(1, _SEEDS.value + 1):
        for number, rate in enumerate(rates):
            for variant in _VARIANTS.value:
                base = Setting(
                    variant, _WORKERS.value, _SERVERS.value, rate, None, None, seed, sizes()
                )
                if variant == ALONE:
                    if number == 0:
                        yield base.alone()
                    continue
                for bound in [None] if variant == TF_KERAS else dense:
                    lookahead = _LOOKAHEAD.value if variant in CACHES else None
                    yield Setting(
                        variant, base.workers, base.servers, rate, bound, lookahead, seed, sizes()
                    )


def job_of(setting: Setting, folder: pathlib.Path) -> Job:
    """The training of a setting; writes its data to the folder."""
    size = setting.sizes
    train, held_out = folder / f"train-{setting.seed}", folder / f"held-out-{setting.seed}"
    if not train.exists():
        generator = criteo_shape.Generator(setting.seed)
        samples = size.epochs * size.steps * setting.workers * size.batch
        criteo_shape.write_batches(generator.draw(samples, stream=0), size.batch, train)
        criteo_shape.write_batches(generator.draw(size.held_out, stream=1), size.batch, held_out)
    cache: dict[str, Any] | None = None
    if setting.variant in CACHES:
        cache = {"capacity": size.capacity, **CACHES[setting.variant]}
        if setting.lookahead is not None:
            cache["lookahead"] = setting.lookahead
    bound = setting.dense_staleness
    return Job(
        train=str(train),
        held_out=str(held_out),
        epochs=size.epochs,
        steps=size.steps * setting.workers,
        workers=setting.workers,
        worker=0,
        steps_per_execution=size.steps_per_execution,
        batch=size.batch,
        dim=size.dim,
        hidden=size.hidden,
        learning_rate=size.learning_rate,
        row_optimizer=size.row_optimizer,
        seed=setting.seed,
        cache=cache,
        strategy={} if bound is None else {"dense_staleness": bound},
    )


def train(setting: Setting, folder: pathlib.Path) -> Run:
    """Runs a setting."""
    job = job_of(setting, folder)
    if setting.variant == ALONE:
        return Run(setting, measure.train_alone(job, _TIMEOUT.value))
    module, path = "netns.train_het_tf", []
    if setting.variant == TF_KERAS:
        module, path = "netns.train_tf_keras", [tf_keras_environment.install()]
    epochs = measure.train_on_cluster(
        job, module, setting.servers, setting.rate, path, _TIMEOUT.value
    )
    return Run(setting, epochs)


def check_flags() -> list[Setting]:
    """The settings that the flags ask for.

    Raises:
      ValueError: a flag is out of its range; the message names it.
    """
    unknown = set(_VARIANTS.value) - set(VARIANTS)
    if unknown:
        raise ValueError(f"--variants: {', '.join(sorted(unknown))} is none of {VARIANTS}")
    for rate in _RATES.value:
        if rate != "none":
            network.bits_per_second(rate)
    if _STEPS.value % _STEPS_PER_EXECUTION.value:
        raise ValueError("--steps is no multiple of --steps_per_execution")
    if _HELD_OUT.value % _BATCH.value:
        raise ValueError("--held_out is no multiple of --batch")
    return list(settings())


def main(argv: list[str]) -> int:
    del argv
    # So that what is left to the end of a with block is done.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda signum, frame: sys.exit(128 + signum))
    try:
        wanted = check_flags()
        if any(setting.variant != ALONE for setting in wanted):
            network.check_permitted()
    except ValueError as error:
        print(f"netns_cluster.py: {error}", file=sys.stderr)
        return os.EX_USAGE
    except network.NotPermittedError as error:
        print(f"netns_cluster.py: {error}", file=sys.stderr)
        return os.EX_NOPERM
    path = pathlib.Path(_JSON.value) if _JSON.value else None
    done = runs.read(path) if path else []
    with tempfile.TemporaryDirectory() as folder:
        for setting in wanted:
            if any(run.setting == setting for run in done):
                continue
            print(
                f"{setting.label}, rate {setting.rate or 'none'}, seed {setting.seed}", flush=True
            )
            done.append(train(setting, pathlib.Path(folder)))
            if path:
                runs.write(path, done)
    rows = {setting.row for setting in wanted}
    figures = runs.figures([run for run in done if run.setting.row in rows])
    table = report.markdown(figures, _TARGET.value)
    print(f"\n{table}", end="")
    if _TABLE.value:
        pathlib.Path(_TABLE.value).write_text(table)
    if _PLOT.value:
        report.plot(figures, pathlib.Path(_PLOT.value))
    return 0


if __name__ == "__main__":
    app.run(main)
