# SPDX-License-Identifier: Apache-2.0
"""The policy lab: picking, queues and engines in virtual time, trial by trial; depends on virtual, workload."""
