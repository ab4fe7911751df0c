# SPDX-License-Identifier: Apache-2.0
"""From work to replicas of each target: which kinds of engine carry it, within bounds, budgets and what nodes have."""
