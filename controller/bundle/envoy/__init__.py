# SPDX-License-Identifier: Apache-2.0
"""Pure: a snapshot of a configuration directory to the files of an Envoy bundle; no network, no clock."""
