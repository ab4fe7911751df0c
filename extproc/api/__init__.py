# SPDX-License-Identifier: Apache-2.0
"""The configuration directory: types, decoding, checks; imports nothing else of extproc."""
