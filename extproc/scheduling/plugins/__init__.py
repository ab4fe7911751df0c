# SPDX-License-Identifier: Apache-2.0
"""Plugins of llm-d, Kthena and ours: each a frozen struct of parameters with one method."""
