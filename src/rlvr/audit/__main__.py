"""python -m rlvr.audit"""

import sys

from rlvr.audit import main, make_parser

__all__ = ["main", "make_parser"]

if __name__ == "__main__":
    sys.exit(main())
