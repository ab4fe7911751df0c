# SPDX-License-Identifier: Apache-2.0
"""The configuration directory: types, decoding, checks; of extproc it imports http_headers alone."""
