# SPDX-License-Identifier: Apache-2.0
"""Writes the reference pages under docs/reference from the code: make generate."""
