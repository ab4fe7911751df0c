# SPDX-License-Identifier: Apache-2.0
"""Rate limits and fair queueing: whether a request may go, and when."""
