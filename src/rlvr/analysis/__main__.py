"""python -m rlvr.analysis"""

import sys

from rlvr.analysis import main, make_parser

__all__ = ["main", "make_parser"]

if __name__ == "__main__":
    sys.exit(main())
