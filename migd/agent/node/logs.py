"""The agent's log: one JSON object a line on standard error, ours and those of the libraries beneath."""

from __future__ import annotations

import logging
import sys
from typing import Final, TextIO, cast

import structlog
from structlog.typing import FilteringBoundLogger, Processor

_SHARED: Final[tuple[Processor, ...]] = (
    structlog.contextvars.merge_contextvars,
    structlog.stdlib.add_log_level,
    structlog.stdlib.add_logger_name,
    structlog.processors.TimeStamper(fmt="iso", utc=True),
    structlog.processors.format_exc_info,
)
_QUIET: Final = ("aiohttp.access", "asyncio", "kubernetes")
"""Loggers that tell of every request; of them only warnings."""


def set_up(node: str, level: int = logging.INFO, stream: TextIO | None = None) -> None:
    """Write the log of this process to the stream, each line with the node's name."""
    rendering = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[*_SHARED],
        processors=[
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            structlog.processors.JSONRenderer(sort_keys=True, ensure_ascii=False),
        ],
    )
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(rendering)
    logging.basicConfig(handlers=[handler], level=level, force=True)
    for name in _QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)
    structlog.contextvars.clear_contextvars()
    structlog.contextvars.bind_contextvars(node=node)


def logger(name: str) -> FilteringBoundLogger:
    """The log of one module: events in a few words, the rest as fields."""
    found = structlog.wrap_logger(
        logging.getLogger(name),
        processors=[
            structlog.stdlib.filter_by_level,  # so that a process that set up no log pays for none
            *_SHARED,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        wrapper_class=structlog.stdlib.BoundLogger,
    )
    return cast("FilteringBoundLogger", found)
