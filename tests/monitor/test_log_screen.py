"""Warnings of the library reach the screen once, in every way to configure logging, and do not tear progress bars."""

from __future__ import annotations

import io
import logging
import sys

import pytest
from rich.console import Console as RichConsole
from rich.logging import RichHandler

from rlvr.config.config_loading import load_config
from rlvr.monitor.console import Console, LiveView
from rlvr.run.run_folder import RunFolder


@pytest.fixture
def folder(tmp_path):
    """The folder of a run; its log is closed at the end."""
    folder = RunFolder(load_config({"run": {"dir": str(tmp_path), "name": "run"}}))
    folder.path.mkdir(parents=True)
    yield folder
    folder.close()


@pytest.fixture
def handle():
    """A function that adds a handler to a logger until the end of the test."""
    added = []

    def add(handler, name=None):
        logging.getLogger(name).addHandler(handler)
        added.append((handler, name))

    yield add
    for handler, name in added:
        logging.getLogger(name).removeHandler(handler)


@pytest.mark.parametrize("mode", ["plain", "quiet"])
def test_a_warning_reaches_the_screen_and_the_file(folder, capsys, mode):
    folder.open_log(Console(mode))
    logging.getLogger("rlvr.rewards").warning("a term %s\nfailed", "x")
    output = capsys.readouterr()
    assert output.out == "warning: a term x\nfailed\n"
    assert output.err == ""
    assert (folder.path / "log.txt").read_text().count("a term x") == 1
    folder.close()
    logging.getLogger("rlvr.rewards").warning("later")
    assert "later" not in capsys.readouterr().out


@pytest.mark.parametrize("name", [None, "rlvr"])
def test_a_program_that_configured_logging_sees_it_once(folder, handle, capsys, name):
    handle(logging.StreamHandler(sys.stderr), name)
    folder.open_log(Console("plain"))
    logging.getLogger("rlvr.rewards").warning("once")
    output = capsys.readouterr()
    assert (output.out + output.err).count("once") == 1


def test_so_does_one_that_logs_through_rich(folder, handle, capsys):
    handle(RichHandler(console=RichConsole(file=sys.stderr)))
    folder.open_log(Console("plain"))
    logging.getLogger("rlvr.rewards").warning("once")
    output = capsys.readouterr()
    assert (output.out + output.err).count("once") == 1


def test_handlers_that_write_elsewhere_do_not_count(folder, handle, capsys, tmp_path):
    handle(logging.FileHandler(tmp_path / "own.log"))
    handle(logging.StreamHandler(io.StringIO()))
    strict = logging.StreamHandler(sys.stderr)
    strict.setLevel(logging.ERROR)
    handle(strict)
    folder.open_log(Console("plain"))
    logging.getLogger("rlvr.rewards").warning("once")
    assert capsys.readouterr().out.count("once") == 1


def test_a_handler_of_the_program_writes_above_the_bars(handle):
    """While the view is shown its stream is the one that rich has put in the place of standard error."""
    stream, handler = sys.stderr, logging.StreamHandler(sys.stderr)
    handle(handler)
    terminal = io.StringIO()
    view = LiveView(RichConsole(file=terminal, force_terminal=True), "grpo", 3, 0, dict)
    view.start()
    try:
        assert handler.stream is sys.stderr is not stream
        logging.getLogger("rlvr").warning("above")
    finally:
        view.stop()
    assert handler.stream is sys.stderr is stream
    assert "above" in terminal.getvalue()
