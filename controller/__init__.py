"""Writes Envoy's configuration; of extproc it knows configuration and protocol names."""
