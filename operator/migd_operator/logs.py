"""Logs as JSON, a line each, ours and those of the libraries alike."""

from __future__ import annotations

import logging
from typing import Final, TextIO

import structlog

_LOUD: Final = ("kopf", "aiohttp.access", "asyncio")
"""Libraries of which only warnings are of interest."""


def log_json(stream: TextIO, level: int = logging.INFO) -> None:
    """Have everything logged to a stream, a JSON object a line: time (UTC), level, logger, event, exception."""
    shared: list[structlog.typing.Processor] = [
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
        structlog.processors.format_exc_info,
    ]
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.JSONRenderer(sort_keys=True, ensure_ascii=False),
            ],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level)
    for name in _LOUD:
        logging.getLogger(name).setLevel(logging.WARNING)
