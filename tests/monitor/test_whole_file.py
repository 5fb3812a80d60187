"""A file is written whole or not at all."""

from __future__ import annotations

import os

from rlvr.monitor.whole_file import write_whole


def test_what_is_no_file_is_written_to_and_not_replaced(tmp_path):
    """As root, a rename over /dev/full or /dev/stdout would take the device's place."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_whole(pipe, "text")
    assert os.read(reader, 10) == b"text"
    os.close(reader)
    assert pipe.is_fifo()


def test_a_file_reaches_the_disk_before_it_takes_its_name(tmp_path, monkeypatch):
    """A power cut after the rename leaves the old content or the new one, and no file of zero bytes."""
    order = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda number: order.append(os.fstat(number).st_size) or fsync(number))
    monkeypatch.setattr(os, "replace", lambda *paths: order.append("renamed") or replace(*paths))
    write_whole(tmp_path / "config.yaml", "run: {}\n")
    assert order == [8, "renamed"]
