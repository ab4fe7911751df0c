# SPDX-License-Identifier: Apache-2.0
"""Autoscalers compared in virtual time; depends on the live autoscaler, baselines, lab, virtual."""
