"""`python -m cotenant`."""

from cotenant.cli import main

main()
