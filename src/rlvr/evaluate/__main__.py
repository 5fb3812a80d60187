"""python -m rlvr.evaluate"""

import sys

from rlvr.evaluate import main, make_parser

__all__ = ["main", "make_parser"]

if __name__ == "__main__":
    sys.exit(main())
