"""Training on hosts with a network of a given rate or delay: het_tf beside tf_keras.

    sudo .venv/bin/python benchmarks/netns_cluster.py --rates=none,1gbit --json=out/netns.json
    sudo .venv/bin/python benchmarks/netns_cluster.py --rates=100mbit --workers=8 --servers=1 \\
        --steps=20 --epochs=3 --timeout=900 --json=out/netns.json
    sudo .venv/bin/python benchmarks/netns_cluster.py --rates=none --delay=1ms --variants=s100 \\
        --dense_staleness=64 --lookahead=2 --json=out/netns.json
    sudo .venv/bin/python benchmarks/netns_cluster.py --rates=none --batches=20 \\
        --variants=alone,unbounded --dense_staleness=1000000 --json=out/netns.json

Every task of a cluster, the chief, the workers and the parameter servers, has a network namespace
to itself, whose link to the others has a rate in both directions (netns/network.py: needs root).
With --delay a packet takes that long from one host to another, so a round trip takes twice as long;
rates are then those of what a host sends, not of what it gets. All share this machine's cores: with
workers enough that they are short of cores, a slower network shows what the network does.

All train the same model (netns/wide_deep.py) on the same batches in the same order, ids and labels
of the shape of Criteo's (netns/criteo_shape.py), with Adagrad at one learning rate:

  alone      each worker in a process of its own with one thread, its table in the process, no
             servers: what a cluster of as many workers cannot beat
  tf_keras   tf_keras's Embedding on tf.distribute.ParameterServerStrategy, installed beside this
             environment, pinned
  no_cache   HetEmbedding without a cache
  s0, default, s100, unbounded
             HetEmbedding with a cache of --capacity rows, or without a number, as by default, what
             a quarter of the free memory holds: staleness 0, CacheConfig's own bounds, staleness
             100, none: nothing is sent but misses, and with --batches that come again and again
             nothing at all
  synchronous, herald
             HetParameterServerStrategy(synchronous=True), with a cache; batches in turn, or by
             het_tf.data.location_aware
  fae        het_tf.data.hot_batches with --hot_percent of the rows, phases of --phase_batches

The last ones once for every --dense_staleness that HetParameterServerStrategy is given: a number,
"none" (TensorFlow's own way, every dense variable on its server), or "default", which gives it none
at all. HetEmbedding has row-wise Adagrad, its own default, unless --row_optimizer=adagrad gives it
tf_keras's.

An epoch is --steps steps of each worker. The first one is not counted: in it TensorFlow traces,
caches fill, and the network has no limit of its rate, nor has it while the AUC is measured. (The
delay is always there.) The table has medians of the others:

  ms/step     of one worker, while the others take theirs. (For a step of the whole cluster, as if
              its workers were one, divide by their number.)
  sent, got   kB (1000 bytes) that a worker's interface counts a step; then the two together by kind
              (netns/runs.py says how; "123+" is with the rest)
  messages    exchanges of the embedding a step
  waited      share of the steps that waited for rows that were looked up ahead; "waited ms" is how
              long, a step, over all steps
  compute, in messages, waiting
              shares of a worker's time (Figures.shares says how; they need "alone")
  servers' CPU ms
              of all servers for one step of one worker
  AUC         on held-out samples after as many examples for all; the mean, and the standard
              deviation over --seeds
  s to AUC    training time to an AUC: --target_auc, by default one that all of the table reach

Every run is put into --json when it ends, and a run that is there already is not made again. Exit
status 77 (EX_NOPERM) where network namespaces may not be made, 75 (EX_TEMPFAIL) while another run
has them.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import pathlib
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

from absl import app, flags
from netns import criteo_shape, measure, network, report, runs, tf_keras_environment
from netns.job import Job
from netns.runs import ALONE, CACHES, SYNCHRONOUS, TF_KERAS, VARIANTS, Run, Setting, Sizes

_WORKERS = flags.DEFINE_integer("workers", 2, "worker tasks", lower_bound=1)
_SERVERS = flags.DEFINE_integer("servers", 2, "parameter server tasks", lower_bound=1)
_RATES = flags.DEFINE_list("rates", ["none", "1gbit"], "of every host: none, or as tc takes it")
_DELAY = flags.DEFINE_string("delay", "none", "of a packet from host to host: none, or e.g. 1ms")
_VARIANTS = flags.DEFINE_list(
    "variants",
    [v for v in VARIANTS if v not in ("unbounded", "fae", *SYNCHRONOUS)],
    f"of {', '.join(VARIANTS)}",
)
_DENSE_STALENESS = flags.DEFINE_list(
    "dense_staleness", ["default", "64"], "of HetParameterServerStrategy; default: not given"
)
_DENSE_WIRE_DTYPE = flags.DEFINE_enum(
    "dense_wire_dtype", "float32", ["float32", "bfloat16"], "of HetParameterServerStrategy"
)
_WIRE_DTYPE = flags.DEFINE_enum(
    "wire_dtype", "float32", ["float32", "bfloat16"], "of HetEmbedding: of rows and gradients"
)
_LOOKAHEAD = flags.DEFINE_integer("lookahead", None, "of CacheConfig; not given by default")
_HOT_PERCENT = flags.DEFINE_float("hot_percent", 2.0, "hot rows of fae, of all")
_PHASE_BATCHES = flags.DEFINE_integer("phase_batches", 32, "of a phase of fae")
_STEPS = flags.DEFINE_integer("steps", 100, "of a worker and epoch", lower_bound=1)
_EPOCHS = flags.DEFINE_integer("epochs", 4, "the first of them for warming up", lower_bound=2)
_STEPS_PER_EXECUTION = flags.DEFINE_integer("steps_per_execution", 20, "steps of a closure")
_BATCHES = flags.DEFINE_integer(
    "batches", None, "different ones of a worker, which come in turn; not given: each step's own"
)
_BATCH = flags.DEFINE_integer("batch", 128, "samples of a step")
_DIM = flags.DEFINE_integer("dim", 128, "columns of a row")
_HIDDEN = flags.DEFINE_list("hidden", ["256", "256"], "widths of the hidden layers")
_CAPACITY = flags.DEFINE_integer(
    "capacity", None, f"rows of a worker's cache; a tenth of all are {criteo_shape.KEYS // 10}"
)
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
        batches=_BATCHES.value,
    )


def settings() -> Iterator[Setting]:
    """What is to be run, from the flags; what is compared with one another close together."""
    rates = [None if rate == "none" else rate for rate in _RATES.value]
    on_cluster = [variant for variant in _VARIANTS.value if variant != ALONE]
    for seed in range(1, _SEEDS.value + 1):
        alone = Setting(ALONE, _WORKERS.value, 0, None, "default", None, seed, sizes())
        if ALONE in _VARIANTS.value:
            yield alone
        for rate, variant in itertools.product(rates, on_cluster):
            for bound in ["default"] if variant == TF_KERAS else _DENSE_STALENESS.value:
                yield dataclasses.replace(
                    alone,
                    variant=variant,
                    servers=_SERVERS.value,
                    rate=rate,
                    dense_staleness=bound,
                    lookahead=_LOOKAHEAD.value if variant in CACHES else None,
                    delay=None if _DELAY.value == "none" else _DELAY.value,
                    dense_wire_dtype=_DENSE_WIRE_DTYPE.value if variant != TF_KERAS else "float32",
                    wire_dtype=_WIRE_DTYPE.value if variant != TF_KERAS else "float32",
                    hot=(_HOT_PERCENT.value, _PHASE_BATCHES.value) if variant == "fae" else None,
                )


def job_of(setting: Setting, folder: pathlib.Path) -> Job:
    """The training of a setting; writes its data to the folder."""
    size = setting.sizes
    train, held_out = folder / f"train-{setting.seed}", folder / f"held-out-{setting.seed}"
    if not train.exists():
        generator = criteo_shape.Generator(setting.seed)
        batches = size.batches or size.epochs * size.steps
        samples = batches * setting.workers * size.batch
        criteo_shape.write_batches(generator.draw(samples, stream=0), size.batch, train)
        criteo_shape.write_batches(generator.draw(size.held_out, stream=1), size.batch, held_out)
    cache: dict[str, Any] | None = None
    if setting.variant in CACHES:
        cache = {"capacity": size.capacity, **CACHES[setting.variant]}
        if setting.lookahead is not None:
            cache["lookahead"] = setting.lookahead
    strategy: dict[str, Any] = {}
    if setting.variant in SYNCHRONOUS:
        strategy["synchronous"] = True
    elif setting.dense_staleness != "default":
        bound = setting.dense_staleness
        strategy["dense_staleness"] = None if bound == "none" else int(bound)
        strategy["dense_wire_dtype"] = setting.dense_wire_dtype
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
        strategy=strategy,
        wire_dtype=setting.wire_dtype,
        location_aware=setting.variant == "herald",
        hot=setting.hot,
    )


def train(setting: Setting, folder: pathlib.Path) -> Run:
    """Runs a setting."""
    job = job_of(setting, folder)
    if setting.variant == ALONE:
        return Run(setting, measure.train_alone(job, _TIMEOUT.value))
    module, path = "netns.train_het_tf", []
    if setting.variant == TF_KERAS:
        module, path = "netns.train_tf_keras", [tf_keras_environment.install()]
    delay = None if setting.delay is None else network.seconds(setting.delay)
    epochs = measure.train_on_cluster(
        job, module, setting.servers, setting.rate, delay, path, _TIMEOUT.value
    )
    return Run(setting, epochs)


def run_all(wanted: Sequence[Setting]) -> list[Run]:
    """The runs of settings: from --json, or made and put there.

    Raises:
      network.NotPermittedError: one is not there, and may not be made here.
      network.InUseError: another run is making some.
    """
    path = pathlib.Path(_JSON.value) if _JSON.value else None
    done = runs.read(path) if path else []
    known = [run.setting for run in done]
    missing = [setting for setting in wanted if setting not in known]
    if any(setting.variant != ALONE for setting in missing):
        network.check_permitted()
    with tempfile.TemporaryDirectory() as folder:
        for setting in missing:
            rate, delay = setting.rate or "none", setting.delay or "none"
            what = f"rate {rate}, delay {delay}, seed {setting.seed}"
            print(f"{setting.label}, {what}", flush=True)
            done.append(train(setting, pathlib.Path(folder)))
            if path:
                runs.write(path, done)
    return [run for run in done if run.setting in wanted]


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
    if _DELAY.value != "none":
        network.seconds(_DELAY.value)
    for bound in _DENSE_STALENESS.value:
        if bound not in ("default", "none") and not bound.isdecimal():
            raise ValueError(f"--dense_staleness: {bound} is no number, none or default")
    if _STEPS.value % _STEPS_PER_EXECUTION.value:
        raise ValueError("--steps is no multiple of --steps_per_execution")
    if _HELD_OUT.value % _BATCH.value:
        raise ValueError("--held_out is no multiple of --batch")
    return list(settings())


def main(argv: list[str]) -> int:
    del argv
    # So that what is left to the end of a with block is done.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda signum, frame: sys.exit(128 + signum))
    try:
        wanted = check_flags()
    except ValueError as error:
        return _fail(error, os.EX_USAGE)
    try:
        figures = runs.figures(run_all(wanted))
    except network.NotPermittedError as error:
        return _fail(error, os.EX_NOPERM)
    except network.InUseError as error:
        return _fail(error, os.EX_TEMPFAIL)
    table = report.markdown(figures, _TARGET.value)
    print(f"\n{table}", end="")
    if _TABLE.value:
        pathlib.Path(_TABLE.value).write_text(table)
    if _PLOT.value:
        report.plot(figures, pathlib.Path(_PLOT.value))
    return 0


def _fail(error: Exception, status: int) -> int:
    print(f"netns_cluster.py: {error}", file=sys.stderr)
    return status


if __name__ == "__main__":
    app.run(main)
