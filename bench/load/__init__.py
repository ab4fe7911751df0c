# SPDX-License-Identifier: Apache-2.0
"""The load client: sends a workload and times it; knows workload and reporting."""
