# SPDX-License-Identifier: Apache-2.0
"""``attache download``: weights from where they are stored to a cache that all pods of a node share."""
