# SPDX-License-Identifier: Apache-2.0
"""Conformance suites of Gateway API and Inference Extension, run against our gateway."""
