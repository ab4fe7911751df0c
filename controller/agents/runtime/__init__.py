# SPDX-License-Identifier: Apache-2.0
"""The runtime agent, a sidecar of an engine: readiness, drain, adapters, batching and metrics."""
