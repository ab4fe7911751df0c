# SPDX-License-Identifier: Apache-2.0
"""The autoscaler: strategies, the decision, the loop that carries it out, and what others may read of it."""
