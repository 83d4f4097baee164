"""`python -m memcalib` is the command line."""

from memcalib.cli import main

main()
