# SPDX-License-Identifier: Apache-2.0
"""The policy lab: picking, queues and the engine model in virtual time, trial by trial; knows virtual, workload."""
