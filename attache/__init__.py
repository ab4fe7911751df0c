"""The one command, attache: finds the program that a word names, and runs it."""

from typing import Final

__version__: Final = "0.1.0"
