# SPDX-License-Identifier: Apache-2.0
"""What queues do for tenants, in virtual time; knows virtual, workload, reporting."""
