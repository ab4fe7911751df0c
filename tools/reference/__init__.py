# SPDX-License-Identifier: Apache-2.0
"""The reference pages under docs/reference, from the code."""
