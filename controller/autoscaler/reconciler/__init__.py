# SPDX-License-Identifier: Apache-2.0
"""What the leader does about AutoscalingPolicyBindings: follow, decide, write replicas, and say so."""
