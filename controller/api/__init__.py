# SPDX-License-Identifier: Apache-2.0
"""The controller's own kinds of custom resources, and the statuses of all kinds."""
