"""What the server's process logs and how: one line an event, as JSON or for a person.

Lines hold request ids, routes, statuses and times; never the text of a document or of a question.
"""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Mapping

import structlog
from structlog.typing import EventDict, Processor

from memkv.config import LogConfig

_LEVELS: Mapping[str, int] = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}


def configure_logging(config: LogConfig) -> None:
    """Sends structlog's events and the standard library's to stderr in one format."""
    as_json = config.format == "json" or (config.format == "auto" and not sys.stderr.isatty())
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _frames_only,
    ]
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    renderer: Processor = (
        structlog.processors.JSONRenderer() if as_json else structlog.dev.ConsoleRenderer(colors=True)
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("memkv").setLevel(_LEVELS[config.level])


def _frames_only(logger: object, name: str, event: EventDict) -> EventDict:
    """An exception as its class and frames: its message and the locals of its frames may quote a document."""
    info = event.pop("exc_info", None)
    if info is True:
        info = sys.exc_info()
    if isinstance(info, BaseException):
        info = (type(info), info, info.__traceback__)
    if isinstance(info, tuple) and info[0] is not None:
        event["error"] = info[0].__qualname__
        event["frames"] = "".join(traceback.format_tb(info[2]))
    return event
