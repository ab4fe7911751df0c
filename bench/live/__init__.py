# SPDX-License-Identifier: Apache-2.0
"""The load client, and comparisons behind a real Envoy on loopback; depends on stack, workload and reporting."""
