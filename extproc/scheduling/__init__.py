# SPDX-License-Identifier: Apache-2.0
"""Endpoint picking: which endpoint takes a request."""
