"""`python3 -m narrowgauge_data` needs Python 3.8, and no installation."""

import os
import sys

from narrowgauge_data.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
