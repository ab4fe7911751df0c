# SPDX-License-Identifier: Apache-2.0
"""The command line: each command is a module with parser(prog) and main(words, prog)."""
