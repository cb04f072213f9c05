"""Parts of the programs in which servers die."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import keras


class AtStep(keras.callbacks.Callback):
    """Does something once, when a number of steps are done."""

    def __init__(self, step: int, action: Callable[[], Any]):
        super().__init__()
        self._step, self._action = step, action

    def on_train_batch_end(self, batch, logs=None):
        if self._action is not None and batch >= self._step:
            action, self._action = self._action, None
            action()


class Warnings(logging.Handler):
    """Keeps the texts of warnings that absl logs, or of all messages from another level on."""

    def __init__(self, level: int = logging.WARNING) -> None:
        super().__init__(level)
        self.texts: list[str] = []
        logger = logging.getLogger("absl")
        logger.setLevel(min(level, logger.getEffectiveLevel()))
        logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())

    def take(self) -> list[str]:
        """The texts since the last call."""
        texts, self.texts = self.texts, []
        return texts
