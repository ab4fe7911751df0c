# SPDX-License-Identifier: Apache-2.0
"""Pure: a cluster's objects to the files of a configuration directory and to statuses; no network, no clock."""
