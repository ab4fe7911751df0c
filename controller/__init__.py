# SPDX-License-Identifier: Apache-2.0
"""Writes Envoy's configuration; of extproc it knows configuration and protocol names."""
