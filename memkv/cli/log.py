"""Where warnings of an embedded memory go: to stderr, one line each; results on stdout stay clean."""

from __future__ import annotations

import sys


def log_warnings_to_stderr() -> None:
    """Sends what memkv logs in this process to whatever `sys.stderr` is then. The server has its own."""
    import logging

    import structlog

    structlog.configure(
        processors=[
            structlog.stdlib.add_log_level,
            structlog.dev.ConsoleRenderer(colors=False, pad_event_to=0),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
        logger_factory=lambda *_: structlog.PrintLogger(sys.stderr),
        cache_logger_on_first_use=False,
    )
