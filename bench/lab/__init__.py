# SPDX-License-Identifier: Apache-2.0
"""The policy lab: one workload, many policies; knows policies, virtual, workload."""
