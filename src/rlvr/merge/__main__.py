"""python -m rlvr.merge"""

import sys

from rlvr.merge import main

if __name__ == "__main__":
    sys.exit(main())
