# SPDX-License-Identifier: Apache-2.0
"""The bundle process: a configuration directory as Envoy's files, and whether Envoy uses them."""
