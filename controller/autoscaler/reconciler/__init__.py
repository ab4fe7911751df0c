# SPDX-License-Identifier: Apache-2.0
"""The leader's reconcile loop of AutoscalingPolicyBindings: watch, decide, write replicas, and report in the status."""
