# SPDX-License-Identifier: Apache-2.0
"""The controller: bundle, gateway, manager, agents; it imports extproc's kinds and wire names."""
