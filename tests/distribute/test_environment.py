"""gRPC settings."""

from __future__ import annotations

import os
import re

from het_tf.distribute.cluster.tf_config import set_grpc_defaults
from het_tf.distribute.failures import probes


def test_pings_come_no_more_often_than_servers_accept(monkeypatch):
    # Every 5 minutes on a silent connection. More often, and a closure that runs for minutes loses
    # its connection ("too_many_pings").
    monkeypatch.delenv("TF_GRPC_DEFAULT_OPTIONS", raising=False)
    set_grpc_defaults()
    options = os.environ["TF_GRPC_DEFAULT_OPTIONS"]
    assert int(re.search(r"grpc\.keepalive_time_ms=(\d+)", options)[1]) > 5 * 60 * 1000


def test_an_attempt_to_connect_takes_no_longer_than_a_probe(monkeypatch):
    # gRPC's own limit is 20 s, several times in a row, before a worker that hangs is left out.
    monkeypatch.delenv("TF_GRPC_DEFAULT_OPTIONS", raising=False)
    set_grpc_defaults()
    options = os.environ["TF_GRPC_DEFAULT_OPTIONS"]
    limit = re.search(r"grpc\.min_reconnect_backoff_ms=(\d+)", options)[1]
    assert int(limit) == 1000 * probes.PROBE_TIMEOUT


def test_what_is_set_stays(monkeypatch):
    monkeypatch.setenv("TF_GRPC_DEFAULT_OPTIONS", "grpc.keepalive_time_ms=1")
    set_grpc_defaults()
    assert os.environ["TF_GRPC_DEFAULT_OPTIONS"] == "grpc.keepalive_time_ms=1"
