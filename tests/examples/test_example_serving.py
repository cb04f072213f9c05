"""examples/serving: a program that trains, and one that serves what it publishes."""

import json
import os
import pathlib
import subprocess
import sys
import time

import keras
import numpy as np
import pytest

import het_tf

ROOT = pathlib.Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "serving"


def start(*arguments: str) -> subprocess.Popen:
    command = [sys.executable, *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


@pytest.mark.exhaustive
def test_what_one_program_trains_another_serves(tmp_path):
    begin, folder = time.time(), str(tmp_path / "live")
    serves = start(str(EXAMPLE / "serve.py"), folder, "--until", "3")
    trains = start(str(EXAMPLE / "train.py"), folder, "--every", "20ms", "--steps", "100")
    trained, _ = trains.communicate(timeout=300)
    served, _ = serves.communicate(timeout=300)
    assert trains.returncode == serves.returncode == 0
    assert "is the last" in trained
    lines = [json.loads(line) for line in served.splitlines() if line.startswith("{")]
    versions = [line["version"] for line in lines]
    assert versions == sorted(set(versions))
    assert versions[-1] >= 3
    assert all(0 < line["click"] < 1 for line in lines)
    # What is served is the fresher for each version, and no older than the program.
    ages = [line["age_seconds"] for line in lines]
    assert all(0 <= age <= time.time() - begin for age in ages)
    before = [line["age_of_the_last"] for line in lines[1:]]
    assert all(age < last for age, last in zip(ages[1:], before, strict=True))


def build_commands() -> str:
    """What the head of serve.cc says."""
    head = (EXAMPLE / "serve.cc").read_text().split("\n#include")[0]
    lines = [line.removeprefix("//   ") for line in head.splitlines() if line.startswith("//   ")]
    (run,) = [line for line in lines if "./serve" in line]
    return "\n".join(line for line in lines if line != run)


@pytest.mark.exhaustive
def test_a_program_without_python_serves_each_version(tmp_path):
    environment = os.environ | {
        "PATH": f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    built = f"cd {tmp_path} && cp {EXAMPLE}/serve.cc . && {build_commands()} && echo $OPS"
    done = subprocess.run(
        ["bash", "-ec", built], env=environment, capture_output=True, text=True, check=True
    )
    ops = done.stdout.split()[-1]

    ids = keras.Input((2,), dtype="int64")
    rows = het_tf.layers.HetEmbedding(4, optimizer=het_tf.optimizers.SGD(1.0), seed=1)(ids)
    model = het_tf.keras.Model(ids, keras.layers.Dense(1)(keras.layers.Flatten()(rows)))
    model.compile("sgd", "mse")
    examples = np.array([[1, 50], [7, 3_000_000_000]])
    with het_tf.serving.publish(model, tmp_path / "live", every="1000s") as publisher:
        command = [str(tmp_path / "serve"), ops, str(tmp_path / "live")]
        with subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as serve:

            def ask(example: np.ndarray) -> tuple[int, float]:
                print(*example, file=serve.stdin, flush=True)
                version, predicted = serve.stdout.readline().split()
                return int(version), float(predicted)

            for version in range(3):
                while ask(examples[0])[0] < version:
                    time.sleep(0.05)
                expected = model.predict_on_batch(examples)[:, 0]
                for example, of_model in zip(examples, expected, strict=True):
                    served, predicted = ask(example)
                    assert served == version
                    np.testing.assert_allclose(predicted, of_model, rtol=0, atol=1e-6)
                model.train_on_batch(examples, np.ones((2, 1)))
                assert not np.allclose(model.predict_on_batch(examples)[:, 0], expected)
                publisher.publish()
            serve.stdin.close()
            assert serve.wait(timeout=30) == 0
