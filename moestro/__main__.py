"""`python -m moestro`."""

from moestro.cli.main import main

main()
