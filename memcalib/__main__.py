"""`python -m memcalib` is the command line."""

from memcalib.commands.cli import main

main()
