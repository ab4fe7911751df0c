# SPDX-License-Identifier: Apache-2.0
"""Processes of this machine, and the stack of Envoy, extproc and engines; depends on reporting and engine."""
