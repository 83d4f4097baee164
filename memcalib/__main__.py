"""`python -m memcalib` is the command line."""

from memcalib.commands.cli import main

if __name__ == "__main__":
    main()
