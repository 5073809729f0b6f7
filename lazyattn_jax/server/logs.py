"""What the server logs: lines for people, or JSON objects for programs."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import Any


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, message, and the fields that ``fields`` has added."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        entry: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


def fields(**values: Any) -> dict[str, Any]:
    """``extra`` of a log call, for ``JsonFormatter``."""
    return {"fields": values}


def set_up_logging(level: str, form: str) -> None:
    """Logs to stderr.

    Args:
      level: what to log: ``debug``, ``info``, ``warning`` or ``error``.
      form: ``text`` or ``json``.
    """
    # Not the root logger: libraries that are imported here have set that up in their own ways.
    handler = logging.StreamHandler()
    text = logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S")
    handler.setFormatter(JsonFormatter() if form == "json" else text)
    # Of the library only what went wrong, unless everything is asked for.
    levels = {"lazyattn_jax": level, "uvicorn": "debug" if level == "debug" else "warning"}
    for name, wanted in levels.items():
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(wanted.upper())
