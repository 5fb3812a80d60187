"""python -m rlvr.train"""

import sys

from rlvr.core.process import tracing
from rlvr.train import main, make_parser

__all__ = ["main", "make_parser"]

if __name__ == "__main__":
    # The stacks of all threads go to standard error at a crash, and on SIGUSR2, which would end the run otherwise.
    tracing.write_stacks()
    sys.exit(main())
