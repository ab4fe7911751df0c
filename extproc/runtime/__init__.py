"""One process or several: puts the parts together; knows all but the command line."""
