"""The training loop: several steps per graph call, one collective per step.

Keras 3's `fit` does not run under MultiWorkerMirroredStrategy, and its optimizers clip before they
reduce, so that the result would depend on the number of workers. Here the gradients are reduced
first, as one flat vector, then clipped by their global norm and applied by Adam.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from perennial.errors import Permanent
from perennial.spec import Training
from training.checkpoint import OPTIMIZER, Values, check_shapes, model_values
from training.input import Rows, indices_of_step

WARM_UP_FRACTION = 0.05
FINAL_RATE = 0.01
BETA_1, BETA_2, EPSILON = 0.9, 0.999, 1e-7


class Loop:
    """One model, its optimizer and the rows it learns from; made inside `strategy.scope()`.

    Args:
        loss: (labels [k], outputs) -> [k].
        steps: the whole run, for the learning rate's schedule.
        rank: this worker's place among `workers`.
    """

    def __init__(
        self,
        model: keras.Model,
        loss: Callable[[Any, Any], Any],
        rows: Rows,
        training: Training,
        strategy: tf.distribute.Strategy,
        *,
        steps: int,
        rank: int,
        workers: int,
    ) -> None:
        self.model, self.loss, self.rows = model, loss, rows
        self.training, self.strategy = training, strategy
        self.steps, self.rank, self.workers = steps, rank, workers
        self.shapes = [tuple(v.shape) for v in model.trainable_variables]
        self.sizes = [int(np.prod(shape)) for shape in self.shapes]
        self.moments = [
            tf.Variable(tf.zeros([sum(self.sizes)]), trainable=False, name=f"{name}_moment")
            for name in ("first", "second")
        ]
        paths = [v.path for v in model.variables]
        if len(set(paths)) != len(paths):
            twice = sorted({path for path in paths if paths.count(path) > 1})
            raise Permanent(
                "train.variable_names",
                f"variables share a path: {', '.join(twice)}",
                hint="give every layer of build_model a name of its own",
            )
        self._variables = {v.path: v.value for v in model.variables} | {
            f"{OPTIMIZER}first_moment": self.moments[0],
            f"{OPTIMIZER}second_moment": self.moments[1],
        }

    def values(self) -> Values:
        """Every variable by its path; call between two steps."""
        return {name: variable.numpy() for name, variable in self._variables.items()}

    def restore(self, values: Values, *, what: str) -> None:
        """Takes up a checkpoint of this run."""
        check_shapes(self.values(), values, code="train.checkpoint_mismatch", what=what)
        for name, variable in self._variables.items():
            variable.assign(values[name])

    def warm_start(self, values: Values, *, what: str) -> None:
        """Takes up another run's weights; the optimizer and the schedule start afresh.

        Raises:
            Permanent: `train.parent_mismatch`, naming the variables.
        """
        own, given = model_values(self.values()), model_values(values)
        check_shapes(own, given, code="train.parent_mismatch", what=what)
        for name in own:
            self._variables[name].assign(given[name])

    def learning_rate(self, step: tf.Tensor) -> tf.Tensor:
        """Linear warm-up, then half a cosine down to a hundredth."""
        warm_up = max(1.0, WARM_UP_FRACTION * self.steps)
        step = tf.cast(step, tf.float32)
        progress = tf.clip_by_value((step - warm_up) / max(1.0, self.steps - warm_up), 0.0, 1.0)
        cosine = FINAL_RATE + (1 - FINAL_RATE) * 0.5 * (1 + tf.cos(np.pi * progress))
        return self.training.learning_rate * tf.minimum((step + 1) / warm_up, cosine)

    @tf.function(jit_compile=False)
    def run(self, first: tf.Tensor, count: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Steps `first` to `first + count`: (mean loss over them and over workers, last norm)."""
        total, norm = tf.zeros([]), tf.zeros([])
        for step in tf.range(first, first + count):
            batch = self.rows.take(
                indices_of_step(
                    step,
                    rows=self.rows.count,
                    seed=self.training.seed,
                    global_batch=self.training.global_batch,
                    rank=self.rank,
                    workers=self.workers,
                )
            )
            reduced = self.strategy.run(self._gradients, args=batch)
            total += reduced[-1]
            norm = self._apply(reduced[:-1], step)
        return total / tf.cast(count, tf.float32), norm

    def _gradients(self, features: dict[str, tf.Tensor], labels: tf.Tensor) -> tf.Tensor:
        """Summed over workers, flat: every gradient, then the loss. [parameters + 1]"""
        variables = self.model.trainable_variables
        with tf.GradientTape() as tape:
            outputs = self.model(features, training=True)
            loss = tf.reduce_sum(self.loss(labels, outputs)) / self.training.global_batch
            penalty = tf.add_n(self.model.losses) if self.model.losses else 0.0
            objective = loss + penalty / self.workers
        gradients = tape.gradient(objective, variables, unconnected_gradients="zero")
        flat = [tf.reshape(tf.convert_to_tensor(g), [-1]) for g in gradients]
        vector = tf.concat([*flat, tf.reshape(loss, [1])], 0)
        return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, vector)

    def _apply(self, gradient: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
        """Adam on the flat gradient [parameters]; returns its norm before clipping."""
        norm = tf.norm(gradient)
        if self.training.clip_norm is not None:
            gradient *= tf.minimum(1.0, self.training.clip_norm / tf.maximum(norm, 1e-12))
        count = tf.cast(step + 1, tf.float32)
        first = BETA_1 * self.moments[0] + (1 - BETA_1) * gradient
        second = BETA_2 * self.moments[1] + (1 - BETA_2) * tf.square(gradient)
        self.moments[0].assign(first)
        self.moments[1].assign(second)
        mean = first / (1 - tf.pow(BETA_1, count))
        deviation = tf.sqrt(second / (1 - tf.pow(BETA_2, count)))
        update = self.learning_rate(step) * mean / (deviation + EPSILON)
        parts = tf.split(update, self.sizes)
        for variable, part, shape in zip(
            self.model.trainable_variables, parts, self.shapes, strict=True
        ):
            variable.value.assign_sub(tf.reshape(part, shape))
        return norm
