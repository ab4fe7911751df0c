# SPDX-License-Identifier: Apache-2.0
"""The one command, attache: finds the program that a word names, and runs it."""

__version__ = "0.1.0"
