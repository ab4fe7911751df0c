# SPDX-License-Identifier: Apache-2.0
"""The controller: bundle, gateway, manager and agents; of extproc it knows kinds and names on the wire."""
