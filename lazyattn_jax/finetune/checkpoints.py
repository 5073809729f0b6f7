"""Checkpoints of training: the best and the last are kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import preservation_policy

from lazyattn_jax.finetune.forward import Weights


class State(NamedTuple):
    """What a step changes: the weights that are trained (float32), and the optimizer's state."""

    weights: Weights
    optimizer: Any


class Checkpoints:
    """The checkpoints of one run; written while training goes on.

    Args:
      folder: made when it is not there.
    """

    def __init__(self, folder: Path) -> None:
        def loss(metrics: Any) -> float:
            return metrics["loss"]

        self._manager = ocp.CheckpointManager(
            folder.absolute(),
            options=ocp.CheckpointManagerOptions(
                best_fn=loss,
                best_mode="min",
                preservation_policy=preservation_policy.AnyPreservationPolicy(
                    [
                        preservation_policy.LatestN(1),
                        preservation_policy.BestN(get_metric_fn=loss, reverse=True, n=1),
                    ]
                ),
            ),
        )

    @property
    def last(self) -> int | None:
        """The last step that has a checkpoint."""
        return self._manager.latest_step()

    @property
    def best(self) -> int | None:
        """The step with the least loss of those that have a checkpoint."""
        return self._manager.best_step()

    def save(self, step: int, state: State, loss: float) -> None:
        """Starts to write a checkpoint."""
        self._manager.save(
            step, args=ocp.args.StandardSave(state._asdict()), metrics={"loss": loss}
        )

    def restore(self, step: int, like: State) -> State:
        """Reads a checkpoint, placed on the devices as ``like`` is.

        Raises:
          ValueError: it is damaged, or of another model or other options.
        """
        self.wait()
        target = jax.tree.map(ocp.utils.to_shape_dtype_struct, like._asdict())
        try:
            return State(**self._manager.restore(step, args=ocp.args.StandardRestore(target)))
        except Exception as error:  # orbax raises plain Exception for data that it cannot read
            raise ValueError(f"checkpoint {step} cannot be used here: {error}") from None

    def wait(self) -> None:
        """Returns when everything has been written."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Writes what is left, and ends."""
        self._manager.close()
