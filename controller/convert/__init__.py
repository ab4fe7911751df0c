# SPDX-License-Identifier: Apache-2.0
"""Objects of other autoscalers as ours, pure: what cannot be carried over is said, nothing is dropped in silence."""
