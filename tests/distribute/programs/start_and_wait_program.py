"""Starts a cluster and waits to be killed: argument MARK, a variable for its servers."""

from __future__ import annotations

import sys
import time

from het_tf.distribute import LocalCluster

with LocalCluster(num_workers=2, num_ps=2, env={"MARK": sys.argv[1]}):
    time.sleep(600)
