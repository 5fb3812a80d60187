"""Verifiers as bytes for worker processes: cloudpickle, so that functions of a notebook, `__main__` and closures go
too."""

from __future__ import annotations

import sys

import cloudpickle

from rlvr.core.component import FILE_MODULE
from rlvr.verifiers.base import Verifier
from rlvr.verifiers.pool.wire import Load

# 256 MB, arbitrary: its template would hold a copy of what the trainer holds already.
MAX_BYTES = 2**28
"""A verifier that holds more (a model, say) stays in the trainer's process."""


def packed(verifier: Verifier) -> Load | str:
    """Return the verifier ready for sending, or the reason why it cannot be sent."""
    try:
        body = cloudpickle.dumps(verifier)
    except Exception as error:  # pickling runs the verifier's own code
        return f"cannot be sent to a worker process ({type(error).__name__}: {error})"
    if len(body) > MAX_BYTES:
        return f"cannot be sent to a worker process (it holds {len(body) >> 20} MB)"
    # A module made of a file (rlvr.registry) is known by that file only.
    # Searched for as bytes: the pickle names the modules of the classes and functions that it refers to. A name too
    # many only loads a file.
    names = [name for name in list(sys.modules) if name.startswith(FILE_MODULE) and name.encode() in body]
    return Load(body, tuple((name, str(sys.modules[name].__file__)) for name in names))
