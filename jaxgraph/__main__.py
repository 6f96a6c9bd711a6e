"""`python -m jaxgraph`: see `jaxgraph.cli`."""

import sys

from jaxgraph.cli import main

if __name__ == "__main__":
    sys.exit(main())
