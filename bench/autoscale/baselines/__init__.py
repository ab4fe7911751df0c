# SPDX-License-Identifier: Apache-2.0
"""Autoscalers of others as their code has them, faults included, each a pure function of a situation."""
