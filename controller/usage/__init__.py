# SPDX-License-Identifier: Apache-2.0
"""The usage process: lines of Envoy's usage log to rows, sums and reports; it needs no other process of ours."""
