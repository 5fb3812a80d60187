"""Warnings of the library on the screen: once, through the run's console, whoever configured logging.

A handler on the logger "rlvr" (the one of log.txt) switches off the last resort of Python's logging, by which a program
that configures nothing would see them.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator

from rich.logging import RichHandler

from rlvr.monitor.console import Console, Level

LIBRARY = "rlvr"


class ConsoleHandler(logging.Handler):
    """Shows warnings on a console, unless a handler of the program shows them on the screen already."""

    def __init__(self, console: Console) -> None:
        super().__init__(logging.WARNING)
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        """Show one record."""
        # A program that shows warnings itself would otherwise show each of them twice.
        if not any(handler.level <= record.levelno and _on_screen(handler) for handler in handlers_of_the_program()):
            level: Level = "error"
            if record.levelno < logging.ERROR:
                level = "warning"
            self._console.message(self.format(record), level)


def handlers_of_the_program() -> Iterator[logging.Handler]:
    """The handlers that get the library's records, ours apart."""
    library = logging.getLogger(LIBRARY)
    # Without propagation, handlers of the root logger never see the library's records.
    loggers = [library]
    if library.propagate:
        loggers.append(logging.getLogger())
    for logger in loggers:
        yield from (handler for handler in logger.handlers if not isinstance(handler, ConsoleHandler))


def _on_screen(handler: logging.Handler) -> bool:
    if isinstance(handler, RichHandler):
        return True
    screens = (sys.stderr, sys.stdout, sys.__stderr__, sys.__stdout__)
    return isinstance(handler, logging.StreamHandler) and handler.stream in screens
