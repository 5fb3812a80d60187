"""python -m rlvr.evaluate"""

import sys

from rlvr.evaluate import main

if __name__ == "__main__":
    sys.exit(main())
