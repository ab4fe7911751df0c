"""The command line: each command is a module with parser(prog) and main(words, prog)."""
