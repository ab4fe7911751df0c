# SPDX-License-Identifier: Apache-2.0
"""The autoscaler in a real cluster of one machine: how fast it acts, and that it loses and cuts nothing."""
