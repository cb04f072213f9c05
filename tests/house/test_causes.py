"""Texts of TensorFlow's errors, as they were seen, and the causes that are read from them."""

from __future__ import annotations

import pytest
import tensorflow as tf

from het_tf.compat.errors import Cause, cause_of, names_job, node_named, tasks_named

ERRORS = tf.errors
SEEN = [
    (ERRORS.UnavailableError, "failed to connect to all addresses", Cause.TRANSPORT),
    (
        ERRORS.AbortedError,
        "Cleanup 5 from remote task /job:worker/replica:0/task:1",
        Cause.TRANSPORT,
    ),
    (
        ERRORS.InternalError,
        "Executing non-communication op <Het>AwaitReplies> originally returned UnavailableError,"
        " and was replaced by InternalError to avoid invoking TF network error handling logic.",
        Cause.TRANSPORT_OF_OP,
    ),
    (ERRORS.InternalError, "Unable to parse request", Cause.OTHER),
    (
        ERRORS.InvalidArgumentError,
        "Unable to find the relevant tensor remote_handle: Op ID: 147, Output num: 0",
        Cause.STALE_HANDLE,
    ),
    (
        ERRORS.InvalidArgumentError,
        "/job:worker/replica:0/task:1/device:CPU:0 unknown device.",
        Cause.UNKNOWN_DEVICE,
    ),
    (
        ERRORS.NotFoundError,
        "Container localhost does not exist. (Could not find resource: localhost/11)\n"
        "\t [[{{node string_lookup_1/None_Lookup/LookupTableFindV2}}]] [Op:IteratorGetNext]",
        Cause.LOST_LOOKUP_TABLE,
    ),
    (
        ERRORS.NotFoundError,
        "Resource localhost/17/N10tensorflow6lookup15LookupInterfaceE does not exist.",
        Cause.LOST_LOOKUP_TABLE,
    ),
    (ERRORS.NotFoundError, "/data/localhost/7/x.index; No such file or directory", Cause.OTHER),
    (ERRORS.InvalidArgumentError, "ids must be in [0, input_dim = 10), not 11", Cause.OTHER),
]


@pytest.mark.parametrize(("kind", "text", "cause"), SEEN)
def test_cause_of_an_error(kind, text, cause):
    assert cause_of(kind(None, None, text)) is cause


def test_tasks_and_nodes_that_an_error_names():
    text = (
        "{{node a/b}} from /job:ps/replica:0/task:3 and /job:worker/replica:0/task:12 of {{node c}}"
    )
    error = ERRORS.UnknownError(None, None, text)
    assert tasks_named(error) == {("ps", 3), ("worker", 12)}
    assert node_named(error) == "a/b"
    assert node_named(ValueError("no node")) == ""
    assert names_job(error, "ps")
    assert not names_job(error, "chief")
