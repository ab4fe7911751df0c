# SPDX-License-Identifier: Apache-2.0
"""Autoscalers side by side in virtual time; knows the live autoscaler, peers, lab, virtual."""
