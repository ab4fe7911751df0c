# SPDX-License-Identifier: Apache-2.0
"""The request path: an Envoy ext_proc server that picks the engine for every request."""
