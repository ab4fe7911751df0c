# SPDX-License-Identifier: Apache-2.0
"""Model: its child objects, and the status derived from them."""
