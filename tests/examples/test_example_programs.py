"""Every example that trains on a cluster runs on generated data and learns."""

from __future__ import annotations

import importlib.util
import pathlib
import re

import numpy as np
import program_runner
import pytest

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
SMALL = ["--workers=2", "--ps=1"]


@pytest.mark.parametrize(
    ("example", "arguments", "figures"),
    [
        ("kge", ["--groups=1", "--dim=64"], {"MRR": 0.3, "Hits@10": 0.5}),
        ("sequence", ["--length=20", "--epochs=10"], {"Hits@10": 0.4}),
        ("retrieval", ["--batch_size=128"], {"Recall@20": 0.9}),
        ("gnn", [], {"AUC": 0.7}),
    ],
    ids=["kge", "sequence", "retrieval", "gnn"],
)
def test_an_example_learns(example, arguments, figures):
    ended = program_runner.run(EXAMPLES / example / "train.py", *SMALL, *arguments, timeout=600)
    assert ended.returncode == 0, ended.stderr[-3000:]
    line = [text for text in ended.stdout.splitlines() if "@" in text or "GraphSAGE" in text][-1]
    for name, least in figures.items():
        found = re.search(rf"\b{name} (\d\.\d+)", line)
        assert found, line
        assert float(found[1]) > least, line


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
