"""``python -m phocas``: the command line."""

from phocas.cli import main

main()
