# SPDX-License-Identifier: Apache-2.0
"""Benchmarks behind a real Envoy on loopback; knows stack, load and reporting."""
