"""python -m rlvr.analysis"""

import sys

from rlvr.analysis import main

if __name__ == "__main__":
    sys.exit(main())
