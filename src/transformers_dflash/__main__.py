"""`python -m transformers_dflash`: the command line, as launchers of several processes start it."""

import sys

from .cli import main

sys.exit(main())
