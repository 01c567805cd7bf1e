"""The application that `./spark-submit.sh` runs: both queries, until it is stopped."""

import sys

from app.main import main

if __name__ == "__main__":
    sys.exit(main())
