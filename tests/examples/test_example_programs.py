"""Programs of examples/ run on generated data and learn."""

from __future__ import annotations

import importlib.util
import pathlib
import re

import numpy as np
import program_runner
import pytest
import tensorflow as tf

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
SMALL = ["--workers=2", "--ps=1"]
KGE = ["--groups=1", "--dim=64", "--learning_rate=0.3", "--epochs=8"]


@pytest.mark.parametrize(
    ("program", "arguments", "figures"),
    [
        ("gnn/train.py", [], {"AUC": 0.7}),
        ("gnn/links.py", [], {"AUC": 0.65}),
        ("kge/train.py", KGE, {"MRR": 0.3, "Hits@10": 0.5}),
        ("retrieval/train.py", ["--batch_size=128", "--epochs=6"], {"Recall@20": 0.9}),
        ("sequence/train.py", ["--length=20", "--epochs=2"], {"Hits@10": 0.4}),
    ],
    ids=["gnn", "links", "kge", "retrieval", "sequence"],
)
def test_an_example_learns(program, arguments, figures):
    ended = program_runner.run(EXAMPLES / program, *SMALL, *arguments, timeout=600)
    assert ended.returncode == 0, ended.stderr[-3000:]
    line = [text for text in ended.stdout.splitlines() if next(iter(figures)) in text][-1]
    for name, least in figures.items():
        found = re.search(rf"\b{name} (\d\.\d+)", line)
        assert found, line
        assert float(found[1]) > least, line


def test_the_ends_of_an_edge_are_in_any_order(tmp_path):
    """The AUC of edges against random nodes would otherwise be that of the numbers of nodes."""
    program = """
import numpy as np, links
links.FLAGS(["links.py"])
_, train, test = links.split(links.load())
print("share", np.mean([left < right for left, right in np.concatenate([train, test])]))
"""
    path = f"import sys; sys.path.insert(0, {str(EXAMPLES / 'gnn')!r})"
    (tmp_path / "program.py").write_text(path + program)
    ended = program_runner.run(tmp_path / "program.py", timeout=600)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert 0.45 < float(re.search(r"share (\S+)", ended.stdout)[1]) < 0.55


def test_click_model_is_written_for_tensorboard_and_exported(tmp_path):
    ended = program_runner.run(
        EXAMPLES / "ctr" / "train.py",
        *SMALL,
        *("--model=dlrm", "--min_count=2", "--hash_bins=20000"),
        f"--tensorboard_dir={tmp_path / 'logs'}",
        f"--export_dir={tmp_path / 'saved_model'}",
        timeout=600,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert float(re.search(r"dlrm: auc (\d\.\d+)", ended.stdout)[1]) > 0.62
    assert list((tmp_path / "logs").rglob("events.out.tfevents.*"))
    served = tf.saved_model.load(tmp_path / "saved_model").signatures["serving_default"]
    ids = {f"C{i}": tf.constant([1, 2], tf.int64) for i in range(1, 27)}
    (chances,) = served(**ids, integers=tf.fill([2, 13], np.nan)).values()
    assert ((chances.numpy() > 0) & (chances.numpy() < 1)).all()


@pytest.mark.exhaustive
def test_the_demo_with_a_schedule(tmp_path):
    ended = program_runner.run(
        EXAMPLES / "ctr" / "demo.py",
        *SMALL,
        *("--schedule=herald", "--capacity=2000", "--epochs=1", "--evaluations=1", "--nodownload"),
        f"--output_dir={tmp_path}",
        timeout=600,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert re.search(r"does user \d+ like movie \d+\? \d+\.\d% likely", ended.stdout)
    assert (tmp_path / "curve.png").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--format=movielens_1m", "--data=folder", "--hash_bins=10"],
            "takes one folder .*--hash_bins=10",
        ),
        (["--format=avazu", "--data=clicks.csv"], r"\['clicks.csv'\] and --test_data=\[\]: give"),
        (["--hash_bins=-3"], "--hash_bins=-3"),
    ],
    ids=["ignored", "no test data", "negative"],
)
def test_wrong_flags_are_named(arguments, message):
    ended = program_runner.run(EXAMPLES / "ctr" / "train.py", *arguments, timeout=600)
    assert ended.returncode != 0
    assert re.search(message, ended.stdout + ended.stderr)


def test_scores_of_triples():
    """Queries for tails and for heads give the same score, the one of the papers."""
    path = EXAMPLES / "kge" / "scores.py"
    spec = importlib.util.spec_from_file_location("examples_kge_scores", path)
    scores = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(scores)
    rng = np.random.default_rng(0)
    h, r, t = rng.normal(0, 1, (3, 5, 8)).astype(np.float32)

    def as_complex(x):
        return x[:, :4] + 1j * x[:, 4:]

    turned = as_complex(h) * np.exp(10j * r[:, :4])
    expected = {
        "transe": scores.MARGIN - np.linalg.norm(h + r - t, axis=1),
        "distmult": (h * r * t).sum(1),
        "complex": (as_complex(h) * as_complex(r) * as_complex(t).conj()).real.sum(1),
        "rotate": scores.MARGIN - np.linalg.norm(turned - as_complex(t), axis=1),
    }
    assert expected.keys() == scores.MODELS.keys()
    for name, model in scores.MODELS.items():
        for query, other in (model.tails(h, r), t), (model.heads(t, r), h):
            pairs = np.array(model.similarity_of_pairs(query, other))[:, 0]
            every = np.array(model.similarity(query, other))
            np.testing.assert_allclose(pairs, expected[name], rtol=1e-3, atol=1e-3)
            np.testing.assert_allclose(np.diagonal(every), expected[name], rtol=1e-3, atol=1e-3)
