"""What `./spark-submit.sh demo` runs: the life of a few collections, with a controller of its own."""

import sys

from app.demo import main

if __name__ == "__main__":
    sys.exit(main())
