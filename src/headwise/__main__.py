"""`python -m headwise` is the command `headwise`."""

from headwise.cli import main

main()
