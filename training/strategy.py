"""The distribution strategy of a run, from `training.strategy` and this worker's place."""

from __future__ import annotations

import json
import os

import tensorflow as tf

from perennial.spec import Training

# A collective that waits longer than this for a peer fails instead of hanging.
COLLECTIVE_TIMEOUT_S = 60.0


def make_strategy(training: Training, rank: int, ports: list[int]) -> tf.distribute.Strategy:
    """The strategy of worker `rank`; TF_CONFIG is set here, before TensorFlow's context starts.

    Args:
        ports: one per worker, on the loopback address.
    """
    if training.strategy == "one_device" or len(ports) == 1:
        return tf.distribute.get_strategy()
    os.environ["TF_CONFIG"] = json.dumps(
        {
            "cluster": {"worker": [f"127.0.0.1:{port}" for port in ports]},
            "task": {"type": "worker", "index": rank},
        }
    )
    options = tf.distribute.experimental.CommunicationOptions(timeout_seconds=COLLECTIVE_TIMEOUT_S)
    return tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
