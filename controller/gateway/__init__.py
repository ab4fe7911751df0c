# SPDX-License-Identifier: Apache-2.0
"""The gateway process: a cluster's objects to a configuration directory, and their statuses."""
