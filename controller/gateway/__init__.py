# SPDX-License-Identifier: Apache-2.0
"""From configuration snapshots to Envoy's files."""
