"""python -m rlvr.audit"""

import sys

from rlvr.audit import main

if __name__ == "__main__":
    sys.exit(main())
