# SPDX-License-Identifier: Apache-2.0
"""Which endpoint has which prefix cached: an approximate and a precise index."""
