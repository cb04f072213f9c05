"""GraphSAGE (Hamilton et al., NIPS 2017): draws neighbours, and takes means over them."""

import os
import tempfile
from collections.abc import Callable, Sequence

import keras
import tensorflow as tf
from keras import layers, ops

from het_tf.datasets import graphs


def is_fanout(fanout: Sequence[int]) -> bool:
    """Whether there is a number of neighbours for each of the two layers."""
    return len(fanout) == 2


def load(folder: str | None, generate: Callable[[str], None]) -> graphs.Graph:
    """The graph of a folder. None: one that `generate` writes."""
    if folder is None:
        folder = tempfile.mkdtemp(prefix="het_tf_graph_")
        generate(folder)
    if any(name.startswith("genres.json") for name in os.listdir(folder)):
        return graphs.load_genres(folder)[0]
    return graphs.load(folder)


def sampler(graph: graphs.Graph, fanout: Sequence[int]) -> Callable[[tf.Tensor], tf.Tensor]:
    """Returns a function from nodes [batch] to ids [batch, near + near * far].

    These are neighbours of the node, and neighbours of each neighbour, drawn with replacement. A
    node without neighbours is its own neighbour.
    """
    near, far = fanout
    offsets, neighbors = tf.constant(graph.offsets), tf.constant(graph.neighbors)
    degrees = tf.constant(graph.degrees)

    def draw(nodes: tf.Tensor, count: int) -> tf.Tensor:
        first, degree = tf.gather(offsets, nodes), tf.gather(degrees, nodes)
        at = tf.random.uniform([tf.size(nodes), count], 0, 2**31 - 1, tf.int64)
        at = first[:, tf.newaxis] + at % tf.maximum(degree, 1)[:, tf.newaxis]
        drawn = tf.gather(neighbors, tf.minimum(at, len(graph.neighbors) - 1))
        return tf.where(degree[:, tf.newaxis] > 0, drawn, nodes[:, tf.newaxis])

    def sample(nodes: tf.Tensor) -> tf.Tensor:
        first = draw(nodes, near)
        second = tf.reshape(draw(tf.reshape(first, [-1]), far), [-1, near * far])
        return tf.concat([first, second], 1)

    return sample


def encode(
    own: keras.KerasTensor,
    neighbors: keras.KerasTensor,
    fanout: Sequence[int],
    hidden: int,
    dropout: float,
) -> keras.KerasTensor:
    """Returns states of nodes.

    Args:
      own: what is known of the nodes themselves, [batch, dim].
      neighbors: vectors of the ids of `sampler`, [batch, near + near * far, dim].
      fanout: near and far.
      hidden: width of a layer.
      dropout: share of the inputs of a layer that are left out.

    Returns:
      [batch, hidden].
    """
    near, far = fanout
    first, second = ops.split(neighbors, [near], axis=1)
    second = ops.reshape(second, (-1, near, far, second.shape[-1]))

    def aggregate(nodes, of_neighbors, dense):
        both = ops.concatenate([nodes, ops.mean(of_neighbors, axis=2)], axis=-1)
        return layers.Dropout(dropout)(dense(both))

    inner, outer = (layers.Dense(hidden, activation="relu") for _ in range(2))
    of_neighbors = aggregate(first, second, inner)
    of_node = aggregate(own[:, None], first[:, None], inner)
    return aggregate(of_node, of_neighbors[:, None], outer)[:, 0]
