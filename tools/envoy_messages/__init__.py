# SPDX-License-Identifier: Apache-2.0
"""Writes extproc's Envoy messages from envoy-data-plane: ``make generate``."""
