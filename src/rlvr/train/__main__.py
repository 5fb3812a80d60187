"""python -m rlvr.train"""

import sys

from rlvr.train import main

if __name__ == "__main__":
    sys.exit(main())
