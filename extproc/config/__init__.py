"""The configuration directory: types, decoding, checks; knows nothing else of extproc."""
