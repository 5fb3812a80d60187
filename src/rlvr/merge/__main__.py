"""python -m rlvr.merge"""

import sys

from rlvr.merge import main, make_parser

__all__ = ["main", "make_parser"]

if __name__ == "__main__":
    sys.exit(main())
