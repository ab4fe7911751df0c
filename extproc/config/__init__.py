"""The configuration directory: types, decoding, validation; knows nothing else of extproc."""
